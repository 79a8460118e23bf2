// zeroexp.tiers has checked dtype, device, contiguity and sizes of what arrives here as addresses, and keeps the memory
// alive until the request is over; nobody else calls this.
#include "io/bind.hpp"

#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "io/engine.hpp"

namespace py = pybind11;

namespace zeroexp::io {
namespace {

Access access_named(const std::string& name) {
  if (name == "read") return Access::read;
  if (name == "write") return Access::write;
  if (name == "create") return Access::create;
  throw std::invalid_argument("access is '" + name + "'; there are read, write and create");
}

std::tuple<int, Outcome> open(FileEngine& engine, const std::string& path, const std::string& access,
                              std::uint64_t bytes) {
  const Access how = access_named(access);
  const py::gil_scoped_release unlocked;
  Outcome outcome;
  const int file = engine.open(path, how, bytes, outcome);
  return {file, outcome};
}

// In slices, so that Ctrl-C ends the wait also when the disk never answers. The ticket stays open then.
Outcome wait(FileEngine& engine, std::uint64_t ticket) {
  Outcome outcome;
  while (true) {
    {
      const py::gil_scoped_release unlocked;
      if (engine.wait(ticket, std::chrono::milliseconds(100), outcome)) return outcome;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

}  // namespace

void bind(py::module_& module) {
  py::class_<Outcome>(module, "FileOutcome", "error: 0, an errno, or -1 where the file ends too early.")
      .def_readonly("error", &Outcome::error)
      .def_readonly("offset", &Outcome::offset)
      .def_readonly("wanted", &Outcome::wanted)
      .def_readonly("done", &Outcome::done)
      .def_readonly("free", &Outcome::free)
      .def_readonly("ended", &Outcome::ended);

  py::class_<FileFacts>(module, "FileFacts")
      .def_readonly("size", &FileFacts::size)
      .def_readonly("direct", &FileFacts::direct)
      .def_readonly("why_buffered", &FileFacts::why_buffered);

  py::class_<FileEngine>(module, "FileEngine", "Asynchronous transfers between memory and files.")
      .def(py::init([](const std::string& kind, std::size_t queue_depth, std::size_t block_size, std::size_t threads) {
             return std::make_unique<FileEngine>(EngineOptions{kind, queue_depth, block_size, threads});
           }),
           py::kw_only(), py::arg("kind"), py::arg("queue_depth"), py::arg("block_size"), py::arg("threads"))
      .def_property_readonly("kind", &FileEngine::kind)
      .def_property_readonly("reason", &FileEngine::reason)
      .def("open", &open, py::arg("path"), py::arg("access"), py::arg("num_bytes"))
      .def("facts", &FileEngine::facts, py::arg("file"))
      .def("sync", &FileEngine::sync, py::arg("file"), py::call_guard<py::gil_scoped_release>())
      .def("close_file", &FileEngine::close, py::arg("file"), py::call_guard<py::gil_scoped_release>())
      .def(
          "submit",
          [](FileEngine& engine, int file, bool write, std::uintptr_t address, std::uint64_t num_bytes,
             std::uint64_t offset) {
            return engine.submit(file, write, reinterpret_cast<void*>(address), num_bytes, offset);
          },
          py::kw_only(), py::arg("file"), py::arg("write"), py::arg("address"), py::arg("num_bytes"), py::arg("offset"),
          py::call_guard<py::gil_scoped_release>())
      .def("shut_down", &FileEngine::shut_down, py::call_guard<py::gil_scoped_release>())
      .def("over", &FileEngine::over, py::arg("ticket"))
      .def("wait", &wait, py::arg("ticket"));
}

}  // namespace zeroexp::io
