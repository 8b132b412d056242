"""The base of all optimizers of a traced network: parameters, options, and copies of the optimizer."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from pathspace.metrics.checks import checked
from pathspace.network import Network
from pathspace.network.errors import expect_network
from pathspace.network.likeness import same_network
from pathspace.network.sharded import refused
from pathspace.optim.base.clipped_gradients import ClippedGradients, Gradients, taken
from pathspace.optim.base.saved_states import (
    BEGUN,
    NOTHING,
    has_content,
    locked,
    of_steps,
    unlocked,
)
from pathspace.rescaling.optimizer_states import Group, State, held_by
from pathspace.squared.sharding import (
    any_process,
    first_sharded,
    from_local,
    full_tensor,
    is_sharded,
    local_shard,
    to_local,
)
from pathspace.torch_private import disable_dynamo

Parameters = Iterable[Tensor] | Iterable[Group] | Iterable[tuple[str, Tensor]]
# parameters with a gradient: parameter, group, gradient
Active = list[tuple[Tensor, Group, Tensor]]

_ENDS = ("gauge_rows", "gauge_columns", "scales")  # kept whole in every process


class NetworkOptimizer(torch.optim.Optimizer):
    """Base of all optimizers of the library.

    Args:
        params: parameters or param groups.
        network: the traced network.
        defaults: options that groups may have of their own.
    """

    clips_by: str | None = "clip_norm"
    """The argument that does what clipping gradients does to others; None if the rule is not invariant anyhow."""
    takes_parts: bool | property = False
    """Whether parameters may be split over processes by FSDP."""
    _is_sharded = False  # whether some are
    # entries of a state that plain rules know by these names and would misread
    _misread: tuple[str, ...] = ()
    _rehearsal: dict[str, Any] | None = (
        None  # what was there before a first step that moved nothing
    )

    def __init__(self, params: Parameters, network: Network, defaults: dict[str, Any]) -> None:
        expect_network(network)
        self.network = network
        self._gradients = Gradients(type(self).__name__, network)
        self._clipped = (
            ClippedGradients(type(self).__name__, self.clips_by) if self.clips_by else None
        )
        # torch adds options of its own to ``defaults`` when it loads a state
        self._of_groups = frozenset(defaults)
        network.check_current(parts=True)
        self._splits = network.splits
        super().__init__(params, defaults)
        if not network.parameters:
            raise ValueError(
                "no parameter of the model is in the network, so train it by the plain rule"
            )
        if not self._in_network(self._all_parameters()):
            if any(map(is_sharded, self._all_parameters())) and not network.splits:
                raise refused(type(self).__name__)  # of a model that was not traced before
            raise ValueError(
                "none of these parameters belongs to the network: trace the model that they are the parameters of "
                "(a copied or converted model must be traced again)"
            )

    @abstractmethod
    def _take(self, active: Active) -> None:
        """Take a step of the parameters that have a gradient."""

    # parts of it, compiled one by one with a whole training step, would round otherwise
    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.
        """
        loss = evaluated(closure)
        self._check_current()  # parameters that were replaced have no gradients any more
        active = self._active()
        if not active:
            return loss
        if active[0][0].is_cuda and torch.cuda.is_current_stream_capturing():
            self._take(active)  # the user records a CUDA graph, in which nothing may be looked at
            return loss
        parameters = [p for p, _, _ in active]
        gradients = [g for _, _, g in active]
        own_parts = list(map(to_local, gradients)) if self._is_sharded else gradients
        self._gradients.expect_finite(parameters, own_parts, self._agreed)
        self._forget_rehearsal()
        if self._is_rehearsal(active):
            self._rehearse(active)
            return loss
        self._gradients.look_for_others(self._all_parameters)
        if self._clipped is not None:
            self._clipped.look(gradients)
        self._take(active)
        return loss

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; see ``torch.optim.Optimizer.add_param_group``.

        Raises:
            ValueError: an option is out of its range, or is one of the whole optimizer, which torch
                would ignore; or a parameter is split over processes, or given twice.
            TypeError: a parameter is complex.
        """
        self._check_group(param_group)
        super().add_param_group(param_group)
        try:
            self._bind(self.param_groups[-1]["params"])
        except BaseException:
            self.param_groups.pop()
            raise

    def _bind(self, parameters: Sequence[Tensor]) -> None:
        """Take parameters on."""
        if any(p.is_complex() for p in parameters):  # a square of theirs is no square of their size
            raise TypeError(
                "a parameter is complex: give it to an optimizer of torch, beside this one"
            )
        if len(set(parameters)) < len(parameters):  # torch warns, and steps twice
            raise ValueError(
                "a parameter stands twice in a group: give list(dict.fromkeys(parameters))"
            )
        self._expect_whole(parameters)
        taken(parameters)

    def _expect_whole(self, parameters: Iterable[Tensor]) -> None:
        """Refuse parameters that are split over processes, where those cannot be stepped.

        Raises:
            ValueError: one is.
        """
        if any(map(is_sharded, parameters)):
            if not self.takes_parts:
                raise refused(type(self).__name__)
            self._is_sharded = True

    def _check_current(self) -> None:
        """Look whether the network is still what it was when this was made.

        Raises:
            RuntimeError: it is not.
        """
        self.network.check_current(parts=True)
        if self.network.splits != self._splits:
            raise RuntimeError(
                f"the model was split over processes (FSDP's fully_shard) after this {type(self).__name__} was made, "
                "whose parameters are no longer the model's: make the optimizer after it, of model.parameters()"
            )

    def _check_group(self, param_group: Group) -> None:
        """Refuse options of a group that are out of their range, or no options of groups.

        Raises:
            ValueError: one is.
        """
        of_optimizer = self._options() - set(self.defaults) - {"params"}
        for name in param_group:
            if name in of_optimizer:
                kind = type(self).__name__
                raise ValueError(
                    f"'{name}' is an option of {kind} as a whole, not of a group: give it to {kind}(...) itself"
                )
        # rules of others may have other options of these names: two numbers as eps, three as betas,
        # no lr
        ours = {
            n: v for n, v in param_group.items() if isinstance(self.defaults.get(n), (Real, Tensor))
        }
        if "betas" in param_group and len(self.defaults.get("betas", ())) == 2:
            ours["betas"] = param_group["betas"]
        checked(**ours)

    @classmethod
    def _options(cls) -> set[str]:
        """Return the names of what the constructor takes, those of a typed dictionary of keywords included."""
        names = set(inspect.signature(cls.__init__).parameters)
        for hint in get_type_hints(cls.__init__).values():
            if get_origin(hint) is Unpack:
                names |= set(get_args(hint)[0].__annotations__)
        return names

    def _active(self) -> Active:
        """Return the parameters that have a gradient.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        active = []
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad
                if g is None:
                    continue
                if g.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} does not support sparse gradients; use Embedding(sparse=False)"
                    )
                active.append((p, group, g))
        return active

    def expect_movable(self, network: Network, names: Iterable[str]) -> None:
        """Refuse to let states follow a rescaling, as ``balance_(network, optimizer=self)`` asks.

        Args:
            network: that is rescaled.
            names: the parameters of all optimizers that follow.

        Raises:
            ValueError: it is another network than this optimizer's, or parameters are split over
                processes.
        """
        del names
        kind = type(self).__name__
        if self._is_sharded:
            raise ValueError(
                f"the parameters of this {kind} are split over processes: rescale before the model is sharded"
            )
        if network is not self.network and not same_network(network, self.network):
            raise ValueError(
                f"this {kind} was made with another network than the one to rescale: give both the same trace"
            )

    def follow_rescaling(self, network: Network, factors: Tensor) -> None:
        """Let states follow the rescaling of the network by factors s, shape ``[num_classes]``."""
        del network
        self._forget_rehearsal()
        for name, p in self._in_network(self._all_parameters()).items():
            if self.state.get(p):
                self._follow(name, self.state[p], factors)

    def _follow(self, name: str, state: State, factors: Tensor) -> None:
        """Let what is kept of a parameter of the network follow a rescaling."""
        del name, state, factors  # of paths, which no rescaling changes

    def _agreed(self, refused: bool) -> bool:
        """Return whether any of the processes that step together refuses a step."""
        if not self._is_sharded:
            return refused
        return any_process(refused, first_sharded(self._all_parameters()))

    # -- a first step that moves nothing -----------------------------------------------------------

    def _is_rehearsal(self, active: Active) -> bool:
        """Return whether this is a first step of rate 0 along gradients of 0, by which tools learn what a state holds.

        ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` of
        torch.distributed.checkpoint take one.
        """
        if any(self.state.values()):
            return False
        rates = [group.get("lr", 0.0) for group in self.param_groups]
        # None: the rule chooses its rate
        if any(rate is None or float(rate) for rate in rates):
            return False
        moves = any(bool(to_local(g).any()) for _, _, g in active)
        split = first_sharded(p for p, _, _ in active)
        return not (moves if split is None else any_process(moves, split))

    def _rehearse(self, active: Active) -> None:
        """Take a step whose state may be looked at, and is forgotten at the next step."""
        before = self._before_rehearsal()
        self._take(active)
        self._rehearsal = before

    def _before_rehearsal(self) -> dict[str, Any]:
        """Return what :meth:`_restore` needs."""
        return {}

    def _restore(self, before: dict[str, Any]) -> None:
        """Put back what was there before a rehearsal."""
        del before
        self.state.clear()

    def _forget_rehearsal(self) -> None:
        """Let the next step be the first, if all that was taken is a rehearsal."""
        before = self._rehearsal
        if before is not None:
            self._rehearsal = None
            self._restore(before)

    @property
    def _has_begun(self) -> bool:
        """Return whether the states hold anything to load."""
        return self._rehearsal is None

    # -- states ------------------------------------------------------------------------------------

    def _all_parameters(self) -> list[Tensor]:
        """Return the parameters of all groups, in the order of a state's indices."""
        return [p for group in self.param_groups for p in group["params"]]

    def _in_network(self, parameters: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return those of some parameters that belong to the network, by name."""
        names = self.network.names_by_id
        return {names[id(p)]: p for p in parameters if id(p) in names}

    def state_dict(self) -> dict[str, Any]:
        """See ``torch.optim.Optimizer.state_dict``."""
        return self._packed(super().state_dict())

    def _packed(self, packed: dict[str, Any]) -> dict[str, Any]:
        """Return a state as it is saved, with an entry for every parameter.

        Tools that save states by the names of parameters need all of these entries. Entries with an
        element for each of a sharded parameter are sharded like it.
        """
        states = {}
        for index, p in enumerate(self._all_parameters()):
            state = packed["state"].get(index, {})
            saved = {key: _as_saved(key, value, p) for key, value in state.items()}
            states[index] = locked(saved, self._misread)
        begun = self._has_begun and any(map(has_content, states.values()))
        packed["param_groups"] = [{**group, BEGUN: begun} for group in packed["param_groups"]]
        if any(states.values()):
            more = global_state(packed)
            packed["state"] = {i: state or {NOTHING: True} for i, state in states.items()} | more
        return packed

    def _unpacked(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Undo :meth:`_packed`; parameters that were full when it was saved may be sharded now, and vice versa."""
        saved = held_by(state_dict["param_groups"])
        # torch tells if they are not as many
        states = {}
        for index, p in zip(saved, self._all_parameters(), strict=False):
            state = unlocked(state_dict["state"].get(index, {}))
            state.pop(NOTHING, None)
            if state:
                states[index] = {key: self._own_part(key, v, p) for key, v in state.items()}
        return {**state_dict, "state": states}

    def _own_part(self, key: str, value: Any, p: Any) -> Any:
        """Return the part of a saved entry that this process keeps."""
        if p is None or not _is_of_elements(key, value):
            return value
        if is_sharded(value) and is_sharded(p) and value.device_mesh == p.device_mesh:
            return to_local(value)
        full = full_tensor(value)
        if is_sharded(p) and full.shape == p.shape:
            return local_shard(full, p).clone()
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state; see ``torch.optim.Optimizer.load_state_dict``.

        It is taken to belong to the weights that the model has at the next step, however they were
        rescaled before.

        Raises:
            ValueError: it is the state of another rule, or of parameters of other shapes, or has
                lost its entries.
            KeyError: it is not the state of an optimizer in path space, where this is one.
        """
        state_dict = {**state_dict}
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._load(of_steps(state_dict, type(self).__name__))
        self._rehearsal = None
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Take a state, as hooks have left it.

        Tensors keep the type that they were saved in, where torch would round float32 values of
        half-precision parameters to half precision.
        """
        state_dict = self._unpacked(state_dict)
        saved, ours = self._check_loaded(state_dict, state_dict["state"])
        loaded = torch.optim.Optimizer(self.param_groups, {})  # which has no hooks
        loaded.load_state_dict(state_dict)
        self.state = loaded.state
        self.param_groups = loaded.param_groups
        for index, p in zip(saved, ours, strict=True):
            state = self.state.get(p, {})
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and key in state and state[key].dtype != value.dtype:
                    state[key] = value.to(p.device)

    def _check_loaded(
        self, state_dict: dict[str, Any], states: Mapping[int, State]
    ) -> tuple[list[int], list[Tensor]]:
        """Look at a saved state before it is taken; the indices in it, and the parameters that they belong to.

        Raises:
            ValueError: it is the state of another rule, or of parameters of other shapes.
        """
        kind = type(self).__name__
        groups = state_dict["param_groups"]
        for group in groups:
            missing = sorted(self._of_groups - group.keys())
            if missing:
                raise ValueError(
                    f"this is not the state of {kind}: its groups lack {', '.join(map(repr, missing))}"
                )
        saved = held_by(groups)
        ours = self._all_parameters()
        names = self.network.names_by_id
        for index, p in zip(saved, ours, strict=False):  # torch tells if they are not as many
            if id(p) in names and (state := states.get(index)):
                self._check_state(names[id(p)], index, state)
        return saved, ours

    def _check_state(self, name: str, index: int, state: State) -> None:
        """Look at the saved state of a parameter of the network.

        Raises:
            ValueError: it does not fit the parameter.
        """
        shape = self.network.parameters[name].shape
        kept_here = to_local(self.network.parameters[name]).shape
        rows = shape[:1].numel()
        # what gauges, and moments of matrix rules, are kept for
        matrix = (rows, shape.numel() // max(1, rows))
        moments = tuple(shape), matrix, tuple(kept_here)
        for key in ("exp_avg", "momentum_buffer", "gauge_rows", "gauge_columns"):
            kept = state.get(key)
            if not isinstance(kept, Tensor):
                continue
            spreads = kept.dim() == 2 and all(
                n in (1, m) for n, m in zip(kept.shape, matrix, strict=True)
            )
            fits = spreads if key.startswith("gauge") else tuple(kept.shape) in moments
            if not fits:
                raise ValueError(
                    f"the state of parameter {index} has a '{key}' of shape {tuple(kept.shape)}, which does not fit "
                    f"'{name}' of shape {tuple(shape)}: was the model the same?"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy for a copy of the model: ``copy.deepcopy((model, optimizer))``."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        # schedulers put a method of this object in the place of ``step``
        copied.__dict__.update(
            {k: self._copied(k, v, memo) for k, v in self.__dict__.items() if k != "step"}
        )
        taken(copied._all_parameters())
        return copied

    def _copied(self, name: str, value: Any, memo: dict[int, Any]) -> Any:
        """Return an attribute of a copy."""
        del name
        return copy.deepcopy(value, memo)

    def __getstate__(self) -> dict[str, Any]:
        # torch would leave out everything but states and groups, and what is loaded could not take
        # a step
        kind = type(self).__name__
        raise TypeError(
            f"{kind} cannot be pickled, because its network cannot: save optimizer.state_dict(), and load it into a "
            f"new {kind} of the model traced anew. For a copy in memory, copy.deepcopy((model, optimizer))"
        )


def global_state(state_dict: dict[str, Any]) -> dict[Any, Any]:
    """Return the entries of a state that belong to no single parameter."""
    saved = set(held_by(state_dict["param_groups"]))
    return {key: kept for key, kept in state_dict["state"].items() if key not in saved}


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return what a closure returns, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _is_of_elements(key: str, value: Any) -> bool:
    """Return whether an entry of a state may have a value for every element of the parameter."""
    return isinstance(value, Tensor) and value.dim() > 0 and not key.endswith(_ENDS)


def _as_saved(key: str, value: Any, p: Tensor) -> Any:
    """Return an entry of a state as it is saved: sharded like its parameter if it has its elements."""
    if _is_of_elements(key, value) and value.shape == to_local(p).shape:
        return from_local(value, p)
    return value
