"""Guards around a module whose parameters may be elsewhere: reading, copying, pickling, moving,
saving and loading it.

Everything here is either right (it gathers first) or refused with the way to do it; nothing hands
out NaN or an empty tensor. Guards do not survive a copy: a copied module is a plain one with whole
parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.hooks import RemovableHandle

from zeroexp.comm import Group, World
from zeroexp.errors import ModelError


class Owner(Protocol):
    """Whoever can make a parameter whole. ``transferable`` owners hand it over to an engine, others
    refuse."""

    transferable: bool

    @property
    def sharded(self) -> bool:
        """Whether this rank holds a slice only."""

    @property
    def world(self) -> World:
        """The ranks that must take part."""

    def holders(self, param: nn.Parameter) -> Group:
        """Those that have the same values of ``param``: all, or those with the same experts."""

    def give_up(self) -> None:
        """All parameters have another owner now: free what is held for them."""

    def touch(self) -> None:
        """Somebody reads the parameter as an attribute of its module."""

    def whole(self, *, edit: bool) -> AbstractContextManager[None]:
        """The parameter is whole inside; with ``edit`` what is written stays. Every rank must take
        part."""


class GuardedParameters(dict[str, Any]):
    """``module._parameters`` of a guarded module: an attribute read tells the owner first."""

    def __init__(
        self, plain: Mapping[str, Any], owners: Mapping[str, Owner], guards: Guards
    ) -> None:
        super().__init__(dict.items(plain) if isinstance(plain, dict) else plain)
        self.owners = dict(owners)
        self.guards = guards
        # Looked up at every use of a weight; where values are always there, nobody need be told.
        self._told = {name: owner for name, owner in owners.items() if owner.sharded}

    def __getitem__(self, name: str) -> Any:
        owner = self._told.get(name)
        if owner is not None:
            owner.touch()
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        owner = self.owners.get(name)
        if owner is not None and value is not super().__getitem__(name):
            if owner.transferable:  # a model under construction ties its weights
                del self.owners[name]
                self._told.pop(name, None)
                super().__setitem__(name, value)
                return
            raise ModelError(
                f"parameter {name} is managed by a zeroexp engine and cannot be replaced; write "
                "into it inside "
                "zeroexp.gathered(parameter, modify_rank=0), or build the engine after the change."
            )
        super().__setitem__(name, value)

    def items(self) -> Any:
        """Iteration reads values too: ``for p in module.parameters()``."""
        for name in self:
            yield name, self[name]

    def values(self) -> Any:
        for name in self:
            yield self[name]

    def _plain_copy(self, memo: dict[int, Any] | None = None) -> dict[str, Any]:
        with whole(self.owners.values()):
            return copy.deepcopy(dict(dict.items(self)), memo)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return self._plain_copy(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        twins = self.guards.twins  # a pickler keeps what it has pickled until it is done
        memo = {key: twin for key, twin in twins.items()}
        table = self._plain_copy(memo)
        for name, param in dict.items(self):
            if param is not None:
                twins[id(param)] = table[name]
        return dict, (table,)


@contextmanager
def whole(owners: Any, *, edit: bool = False) -> Iterator[None]:
    """All of ``owners`` whole at once; each only once."""
    with ExitStack() as stack:
        for owner in {id(o): o for o in owners}.values():
            stack.enter_context(owner.whole(edit=edit))
        yield


class ModuleHook:
    """A hook that stays behind when its module is copied or pickled."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if get_eval_frame_callback() is not None:
            return torch.compiler.disable(self._call)(*args, **kwargs)
        return self._call(*args, **kwargs)

    # A compiled module calls this between two graphs: what gathers must not become part of one.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (_THIS_MODULE, "no_hook")


def no_hook(*args: Any, **kwargs: Any) -> None:
    """What a copied module has in the place of a :class:`ModuleHook`."""


class _ThisModule:
    """Pickles as an import of this module."""

    def __reduce__(self) -> tuple[Any, ...]:
        import importlib

        return importlib.import_module, (__name__,)


_THIS_MODULE = _ThisModule()


class _GuardedApply:
    """Stands in for ``module._apply``: parameters cannot change dtype or device any more, buffers
    can."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> nn.Module:
        module = self._module
        if recurse:
            for child in module.children():
                child._apply(fn)
        for param in dict.values(module._parameters):
            if param is not None:
                probe = torch.zeros(1, dtype=param.dtype, device=param.device)
                result = fn(probe)
                if result.dtype != probe.dtype or result.device != probe.device:
                    raise ModelError(
                        f"the module's parameters are managed by a zeroexp engine ({probe.dtype} "
                        f"on {probe.device}) and "
                        f"cannot be moved to {result.dtype} on {result.device}. Set precision and "
                        "device in the "
                        "configuration, or call engine.close() first."
                    )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo.get(id(self._module))
        return _own_apply(twin) if twin is not None else no_hook

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_apply, (self._module,)


def _own_apply(module: nn.Module) -> MethodType:
    """``module._apply`` as its class defines it."""
    return MethodType(type(module)._apply, module)


class Guards:
    """Installs and removes the guards of one engine (or of a sharded build)."""

    def __init__(self, on_remove: Callable[[], None] = lambda: None) -> None:
        self._modules: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._on_remove = on_remove
        self.twins: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
        """Copies by ``id(parameter)`` while they are being pickled: tied weights are one copy."""

    def install(self, module: nn.Module, owners: Mapping[str, Owner]) -> None:
        """Guard the direct parameters of ``module`` named in ``owners``."""
        table = module._parameters
        before = table.owners if isinstance(table, GuardedParameters) else {}
        module.__dict__["_parameters"] = GuardedParameters(table, {**before, **owners}, self)
        module.__dict__["_apply"] = _GuardedApply(module)
        self._modules.append(module)
        everyone = list(owners.values())
        stack = ExitStack()

        def clone_entries(
            mod: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
        ) -> None:
            with whole(everyone):
                for name in owners:
                    key = prefix + name
                    if key in state:
                        value = dict.__getitem__(mod._parameters, name)
                        if value is not None:
                            state[key] = value.detach().clone()

        def open_for_load(*_: Any) -> None:
            stack.enter_context(whole(everyone, edit=True))

        def close_after_load(*_: Any) -> None:
            stack.close()

        self._handles += [
            module._register_state_dict_hook(ModuleHook(clone_entries)),
            module.register_load_state_dict_pre_hook(ModuleHook(open_for_load)),
            module.register_load_state_dict_post_hook(ModuleHook(close_after_load)),
        ]

    def keep(self, *handles: RemovableHandle) -> None:
        """Remove ``handles`` together with the guards."""
        self._handles += handles

    def remove(self) -> None:
        """Make the modules plain again."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            module.__dict__["_parameters"] = dict(dict.items(module._parameters))
            module.__dict__.pop("_apply", None)
        self._handles, self._modules = [], []
        self._on_remove()
