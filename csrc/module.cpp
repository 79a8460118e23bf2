// The Python face of the compiled ops: zeroexp._C. Import torch first, so that both share one OpenMP runtime.
// zeroexp.ops has checked dtype, device, contiguity and sizes of what arrives here as addresses; nobody else calls it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.hpp"
#include "host_range.hpp"
#include "io/bind.hpp"
#include "io/checksum.hpp"

namespace py = pybind11;

namespace {

using zeroexp::AdagradArgs;
using zeroexp::AdamArgs;
using zeroexp::KernelTable;
using zeroexp::LionArgs;
using zeroexp::SgdArgs;
using zeroexp::Type;

Type type_named(const std::string& name) {
  if (name == "float32") return Type::f32;
  if (name == "bfloat16") return Type::bf16;
  if (name == "float16") return Type::f16;
  if (name == "float64") return Type::f64;
  if (name.empty()) return Type::none;
  throw std::invalid_argument("no kernel for dtype '" + name + "'");
}

// The types of a step's gradient and copy-out.
struct StepTypes {
  Type grad, copy;
};

StepTypes step_types(const std::string& grad, const std::string& copy) {
  const StepTypes types{type_named(grad), type_named(copy)};
  if (types.grad > Type::f16) throw std::invalid_argument("no optimizer kernel for gradients of " + grad);
  if (types.copy == Type::f64) throw std::invalid_argument("no optimizer kernel for a copy of " + copy);
  return types;
}

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The kernels of one instruction set.
class Kernels {
 public:
  explicit Kernels(const std::string& isa) : table_(zeroexp::table_for(isa)) {}

  const char* isa() const { return table_.name; }

  void adam(std::uintptr_t param, std::uintptr_t grad, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq,
            std::uintptr_t copy, std::size_t size, const std::string& grad_type, const std::string& copy_type, bool l2,
            double grad_scale, double decay, double weight_decay, double one_minus_beta1, double beta2,
            double one_minus_beta2, double bias2_sqrt, double eps, double neg_step_size, int threads) const {
    const AdamArgs args{at<float>(param),
                        at<float>(exp_avg),
                        at<float>(exp_avg_sq),
                        at<const void>(grad),
                        at<void>(copy),
                        static_cast<float>(grad_scale),
                        static_cast<float>(decay),
                        static_cast<float>(weight_decay),
                        static_cast<float>(one_minus_beta1),
                        static_cast<float>(beta2),
                        static_cast<float>(one_minus_beta2),
                        static_cast<float>(bias2_sqrt),
                        static_cast<float>(eps),
                        static_cast<float>(neg_step_size)};
    const StepTypes types = step_types(grad_type, copy_type);
    py::gil_scoped_release unlocked;
    zeroexp::run_adam(table_, args, size, types.grad, types.copy, l2, threads);
  }

  void sgd(std::uintptr_t param, std::uintptr_t grad, std::uintptr_t momentum_buffer, std::uintptr_t copy,
           std::size_t size, const std::string& grad_type, const std::string& copy_type, double grad_scale,
           double weight_decay, double momentum, double one_minus_dampening, double neg_lr, bool first, bool nesterov,
           int threads) const {
    const SgdArgs args{at<float>(param),
                       at<float>(momentum_buffer),
                       at<const void>(grad),
                       at<void>(copy),
                       static_cast<float>(grad_scale),
                       static_cast<float>(weight_decay),
                       static_cast<float>(momentum),
                       static_cast<float>(one_minus_dampening),
                       static_cast<float>(neg_lr),
                       first,
                       nesterov};
    const StepTypes types = step_types(grad_type, copy_type);
    py::gil_scoped_release unlocked;
    zeroexp::run_sgd(table_, args, size, types.grad, types.copy, threads);
  }

  void adagrad(std::uintptr_t param, std::uintptr_t grad, std::uintptr_t sum, std::uintptr_t copy, std::size_t size,
               const std::string& grad_type, const std::string& copy_type, double grad_scale, double weight_decay,
               double eps, double neg_step_size, int threads) const {
    const AdagradArgs args{at<float>(param),
                           at<float>(sum),
                           at<const void>(grad),
                           at<void>(copy),
                           static_cast<float>(grad_scale),
                           static_cast<float>(weight_decay),
                           static_cast<float>(eps),
                           static_cast<float>(neg_step_size)};
    const StepTypes types = step_types(grad_type, copy_type);
    py::gil_scoped_release unlocked;
    zeroexp::run_adagrad(table_, args, size, types.grad, types.copy, threads);
  }

  void lion(std::uintptr_t param, std::uintptr_t grad, std::uintptr_t exp_avg, std::uintptr_t copy, std::size_t size,
            const std::string& grad_type, const std::string& copy_type, double grad_scale, double decay, double beta1,
            double one_minus_beta1, double beta2, double one_minus_beta2, double neg_lr, int threads) const {
    const LionArgs args{at<float>(param),
                        at<float>(exp_avg),
                        at<const void>(grad),
                        at<void>(copy),
                        static_cast<float>(grad_scale),
                        static_cast<float>(decay),
                        static_cast<float>(beta1),
                        static_cast<float>(one_minus_beta1),
                        static_cast<float>(beta2),
                        static_cast<float>(one_minus_beta2),
                        static_cast<float>(neg_lr)};
    const StepTypes types = step_types(grad_type, copy_type);
    py::gil_scoped_release unlocked;
    zeroexp::run_lion(table_, args, size, types.grad, types.copy, threads);
  }

  void adam_traffic(std::uintptr_t param, std::uintptr_t grad, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq,
                    std::size_t size, int threads) const {
    AdamArgs args{};
    args.param = at<float>(param);
    args.grad = at<const void>(grad);
    args.exp_avg = at<float>(exp_avg);
    args.exp_avg_sq = at<float>(exp_avg_sq);
    py::gil_scoped_release unlocked;
    zeroexp::run_adam_traffic(table_, args, size, threads);
  }

  double sum_squares(std::uintptr_t data, std::size_t size, const std::string& type, int threads) const {
    const Type kind = type_named(type);
    if (kind == Type::none) throw std::invalid_argument("sum_squares needs a dtype");
    py::gil_scoped_release unlocked;
    return zeroexp::run_sum_squares(table_, at<const void>(data), size, kind, threads);
  }

  void sum_into(std::uintptr_t out, const std::vector<std::uintptr_t>& parts, std::size_t size, const std::string& type,
                int threads) const {
    const Type kind = type_named(type);
    if (kind == Type::none || parts.empty()) throw std::invalid_argument("sum_into needs a dtype and parts");
    std::vector<const void*> addresses;
    addresses.reserve(parts.size());
    for (const std::uintptr_t part : parts) addresses.push_back(at<const void>(part));
    py::gil_scoped_release unlocked;
    zeroexp::run_sum_into(table_, at<void>(out), addresses, size, kind, threads);
  }

  void divide_into(std::uintptr_t out, std::uintptr_t part, double divisor, std::size_t size, const std::string& type,
                   bool add, int threads) const {
    const Type kind = type_named(type);
    if (kind > Type::f16) throw std::invalid_argument("no divide_into kernel for parts of " + type);
    py::gil_scoped_release unlocked;
    zeroexp::run_divide_into(table_, at<float>(out), at<const void>(part), static_cast<float>(divisor), size, kind, add,
                             threads);
  }

  double scale_cast(std::uintptr_t out, std::uintptr_t part, double scale, std::size_t size,
                    const std::string& part_type, const std::string& out_type, int threads) const {
    const Type from = type_named(part_type), to = type_named(out_type);
    if (from > Type::f16 || to > Type::f16) {
      throw std::invalid_argument("no scale_cast kernel from " + part_type + " to " + out_type);
    }
    py::gil_scoped_release unlocked;
    return zeroexp::run_scale_cast(table_, at<void>(out), at<const void>(part), static_cast<float>(scale), size, from,
                                   to, threads);
  }

  bool adopt_edits(std::uintptr_t master, std::uintptr_t low, std::size_t size, const std::string& low_type,
                   int threads) const {
    const Type kind = type_named(low_type);
    if (kind > Type::f16) throw std::invalid_argument("no adopt_edits kernel for values of " + low_type);
    py::gil_scoped_release unlocked;
    return zeroexp::run_adopt_edits(table_, at<float>(master), at<const void>(low), size, kind, threads);
  }

  std::uint64_t checksum(std::uintptr_t address, std::size_t num_bytes, std::uint64_t seed) const {
    py::gil_scoped_release unlocked;
    return zeroexp::io::checksum(table_, at<const void>(address), num_bytes, seed);
  }

 private:
  const KernelTable& table_;
};

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Compiled ops of zeroexp; use zeroexp.ops.";
  module.def("available_isas", &zeroexp::available_isas, "Instruction sets of this machine, slowest first.");

  py::class_<Kernels>(module, "Kernels", "The kernels of one instruction set; '' takes the fastest.")
      .def(py::init<const std::string&>(), py::arg("isa") = "")
      .def_property_readonly("isa", &Kernels::isa)
      .def("adam", &Kernels::adam, py::kw_only(), py::arg("param"), py::arg("grad"), py::arg("exp_avg"),
           py::arg("exp_avg_sq"), py::arg("copy"), py::arg("size"), py::arg("grad_type"), py::arg("copy_type"),
           py::arg("l2"), py::arg("grad_scale"), py::arg("decay"), py::arg("weight_decay"), py::arg("one_minus_beta1"),
           py::arg("beta2"), py::arg("one_minus_beta2"), py::arg("bias2_sqrt"), py::arg("eps"),
           py::arg("neg_step_size"), py::arg("threads"))
      .def("sgd", &Kernels::sgd, py::kw_only(), py::arg("param"), py::arg("grad"), py::arg("momentum_buffer"),
           py::arg("copy"), py::arg("size"), py::arg("grad_type"), py::arg("copy_type"), py::arg("grad_scale"),
           py::arg("weight_decay"), py::arg("momentum"), py::arg("one_minus_dampening"), py::arg("neg_lr"),
           py::arg("first"), py::arg("nesterov"), py::arg("threads"))
      .def("adagrad", &Kernels::adagrad, py::kw_only(), py::arg("param"), py::arg("grad"), py::arg("sum"),
           py::arg("copy"), py::arg("size"), py::arg("grad_type"), py::arg("copy_type"), py::arg("grad_scale"),
           py::arg("weight_decay"), py::arg("eps"), py::arg("neg_step_size"), py::arg("threads"))
      .def("lion", &Kernels::lion, py::kw_only(), py::arg("param"), py::arg("grad"), py::arg("exp_avg"),
           py::arg("copy"), py::arg("size"), py::arg("grad_type"), py::arg("copy_type"), py::arg("grad_scale"),
           py::arg("decay"), py::arg("beta1"), py::arg("one_minus_beta1"), py::arg("beta2"), py::arg("one_minus_beta2"),
           py::arg("neg_lr"), py::arg("threads"))
      .def("adam_traffic", &Kernels::adam_traffic, py::kw_only(), py::arg("param"), py::arg("grad"), py::arg("exp_avg"),
           py::arg("exp_avg_sq"), py::arg("size"), py::arg("threads"),
           "Benchmark only: 4 reads and 3 writes of `size` floats without Adam's arithmetic.")
      .def("sum_squares", &Kernels::sum_squares, py::kw_only(), py::arg("data"), py::arg("size"), py::arg("type"),
           py::arg("threads"))
      .def("sum_into", &Kernels::sum_into, py::kw_only(), py::arg("out"), py::arg("parts"), py::arg("size"),
           py::arg("type"), py::arg("threads"))
      .def("divide_into", &Kernels::divide_into, py::kw_only(), py::arg("out"), py::arg("part"), py::arg("divisor"),
           py::arg("size"), py::arg("type"), py::arg("add"), py::arg("threads"))
      .def("scale_cast", &Kernels::scale_cast, py::kw_only(), py::arg("out"), py::arg("part"), py::arg("scale"),
           py::arg("size"), py::arg("part_type"), py::arg("out_type"), py::arg("threads"))
      .def("adopt_edits", &Kernels::adopt_edits, py::kw_only(), py::arg("master"), py::arg("low"), py::arg("size"),
           py::arg("low_type"), py::arg("threads"))
      .def("checksum", &Kernels::checksum, py::kw_only(), py::arg("address"), py::arg("num_bytes"), py::arg("seed"));

  py::class_<zeroexp::HostRange>(module, "HostRange", py::buffer_protocol())
      .def(py::init<std::size_t>(), py::arg("num_bytes"))
      .def_buffer([](zeroexp::HostRange& range) {
        return py::buffer_info(static_cast<std::uint8_t*>(range.data()), static_cast<py::ssize_t>(range.size()));
      })
      .def_property_readonly("num_bytes", &zeroexp::HostRange::size)
      .def_property_readonly("huge_pages", &zeroexp::HostRange::huge_pages)
      .def_property_readonly("resident_bytes", &zeroexp::HostRange::resident_bytes)
      .def("release", &zeroexp::HostRange::release, py::call_guard<py::gil_scoped_release>())
      .def("take_pages", &zeroexp::HostRange::take_pages, py::arg("source"), py::call_guard<py::gil_scoped_release>());

  zeroexp::io::bind(module);
}
