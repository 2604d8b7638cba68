"""Optimizers that stores run on the values they keep, with the arithmetic of MXNet's, operation by operation.

All constants and products are in the weight's own element type, from left to right, so that weights are equal to MXNet's to
the last bit. With float16 weights every operation rounds to float16, unless ``multi_precision`` keeps float32 masters.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from hvdlab.collectives.errors import KVStoreError
from hvdlab.collectives.kvstore import lr_schedulers, optimizer_state
from hvdlab.collectives.kvstore.arrays import Array, RowSparse
from hvdlab.collectives.kvstore.base import Key

State = Any
"""``None``, an array, or a tuple of states."""

Gradient = Array | RowSparse

_BLOCK = 1 << 14
"""Elements that are updated at once."""

_OBJECTS = ("lr_scheduler", "param_dict")
"""Attributes of an optimizer that are objects, and may be of the program's own classes. Parameters are not saved, and stay when states are
loaded; so is a scheduler that is none of ``lr_schedulers``."""


class _DefaultRate(float):
    """Learning rate that was not given: a scheduler, if there is one, keeps its own."""


_DEFAULT_RATE = _DefaultRate(0.01)


@runtime_checkable
class _Multipliers(Protocol):
    lr_mult: float
    wd_mult: float


def _constant(value: float, like: Array) -> Any:
    """Return a number in the type of an array, by way of float32, as which MXNet's operators read their parameters."""
    kind: Any = like.dtype.type
    return _constant_of(value, kind) if value else kind(value)  # zeros differ in their sign, and are equal


@functools.lru_cache(maxsize=256)
def _constant_of(value: float, kind: Any) -> Any:
    with np.errstate(over="ignore", under="ignore"):
        return kind(np.float32(value))


def _blocks(*arrays: Array | None) -> Iterator[tuple[Any, ...]]:
    """Yield slices of arrays of one shape, so small that they and the results computed from them fit the cache. ``None`` stays."""
    flat = [array if array is None or not array.flags.c_contiguous else array.reshape(-1) for array in arrays]
    if any(array is not None and array.ndim != 1 for array in flat):
        yield arrays  # a copy of one that is not contiguous could not be written to
        return
    size = max(array.size for array in flat if array is not None)
    for start in range(0, size, _BLOCK):
        yield tuple(None if array is None else array[start : start + _BLOCK] for array in flat)


class Optimizer:
    """Base of all optimizers: learning rates, weight decay and counts of updates, per key.

    A subclass has ``create_state`` and ``update``; with :func:`register` it is found by its name.

    Args:
        learning_rate: How far a step goes. With a scheduler, its ``base_lr`` becomes this; by default it stays.
        wd: Weight decay (L2), added to the gradient.
        rescale_grad: Factor for every gradient, such as one over the batch's size.
        clip_gradient: Bound of each element of a rescaled gradient's size; ``None`` or 0 for none.
        lr_scheduler: ``lr_scheduler(num_update)`` gives the learning rate; ``num_update`` is the most updates of any key. One of
            :mod:`hvdlab.kvstore.lr_scheduler`, or any function; servers accept only those.
        multi_precision: Keep a float32 copy of float16 weights, and compute on that.
        begin_num_update: Updates that count as done at the start.
        param_idx2name: Names of integer keys. Once there are any, weight decay is 0 for those that end in neither
            ``_weight`` nor ``_gamma``.
        param_dict: Objects with ``lr_mult`` and ``wd_mult`` by key, such as parameters.

    Attributes:
        lr: The learning rate.
        lr_mult: Factors of the learning rate by key or name.
        wd_mult: Factors of the weight decay by key or name.
        num_update: The most updates that any key has had.
    """

    def __init__(
        self,
        learning_rate: float = _DEFAULT_RATE,
        *,
        wd: float = 0.0,
        rescale_grad: float = 1.0,
        clip_gradient: float | None = None,
        lr_scheduler: Callable[[int], float] | None = None,
        multi_precision: bool = False,
        begin_num_update: int = 0,
        param_idx2name: Mapping[int, str] | None = None,
        param_dict: Mapping[Key, _Multipliers] | None = None,
    ) -> None:
        given = not isinstance(learning_rate, _DefaultRate)
        self.lr = learning_rate if given else float(learning_rate)
        self.wd = wd
        self.rescale_grad = rescale_grad
        self.clip_gradient = clip_gradient
        self.lr_scheduler = lr_scheduler
        self.multi_precision = multi_precision
        self.begin_num_update = begin_num_update
        self.num_update = begin_num_update
        self.idx2name: dict[Any, str] = dict(param_idx2name or {})
        self.param_dict: dict[Key, _Multipliers] = dict(param_dict or {})
        self.lr_mult: dict[Any, float] = {}
        self.wd_mult: dict[Any, float] = {}
        self._index_update_count: dict[Key, int] = {}
        self.set_wd_mult({})
        if lr_scheduler is not None and hasattr(lr_scheduler, "base_lr") and given:
            lr_scheduler.base_lr = learning_rate

    @property
    def learning_rate(self) -> float:
        """Return the learning rate now, before the keys' factors."""
        return self.lr if self.lr_scheduler is None else self.lr_scheduler(self.num_update)

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate to ``lr`` from the next update on. Raises ``UserWarning`` if there is a scheduler."""
        if self.lr_scheduler is not None:
            raise UserWarning("the learning rate comes from lr_scheduler; change that instead")
        self.lr = lr

    def set_lr_mult(self, args_lr_mult: Mapping[Any, float]) -> None:
        """Set factors of the learning rate by key, or by the name of an integer key; all others become 1.

        Args:
            args_lr_mult: The factors.
        """
        self.lr_mult = dict(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Mapping[Any, float]) -> None:
        """Set factors of the weight decay by key, or by the name of an integer key; the others get their defaults.

        Args:
            args_wd_mult: The factors.
        """
        self.wd_mult = {
            name: 0.0 for name in self.idx2name.values() if not name.endswith(("_weight", "_gamma"))
        }
        self.wd_mult.update(args_wd_mult)

    def create_state(self, index: Key, weight: Array) -> State:
        """Return the state to keep for one key besides the weight; called at the first update of the key ``index``."""
        return None

    def update(self, index: Key, weight: Array, grad: Gradient, state: State) -> None:
        """Change ``weight`` and ``state`` in place.

        Args:
            index: The key.
            weight: The whole weight.
            grad: Its gradient, of the same type; row-sparse if only some rows have one.
            state: The state that ``create_state`` returned for this key.
        """
        raise NotImplementedError

    def create_state_multi_precision(self, index: Key, weight: Array) -> State:
        """Return the state of the key ``index``; with ``multi_precision`` and a float16 weight a float32 copy of it comes first."""
        if weight.dtype != np.float16:
            return self.create_state(index, weight)
        if self.multi_precision:
            master = weight.astype(np.float32)
            return (master, self.create_state(index, master))
        warnings.warn(
            "Accumulating with float16 in optimizer can lead to poor accuracy or slow convergence. "
            "Consider using multi_precision=True option of the optimizer",
            stacklevel=2,
        )
        return self.create_state(index, weight)

    def update_multi_precision(self, index: Key, weight: Array, grad: Gradient, state: State) -> None:
        """Update as :meth:`update` does, with the state of :meth:`create_state_multi_precision`.

        Args:
            index, weight, grad, state: As for :meth:`update`.
        """
        if weight.dtype != np.float16 or not self.multi_precision:
            self.update(index, weight, grad, state)
            return
        master, own = state
        if isinstance(grad, RowSparse):
            grad = RowSparse(grad.data.astype(np.float32), grad.indices, grad.shape)
        else:
            grad = grad.astype(np.float32)
        self.update(index, master, grad, own)
        with np.errstate(over="ignore"):
            weight[...] = master

    def _update_count(self, index: Key) -> None:
        count = self._index_update_count.get(index, self.begin_num_update) + 1
        self._index_update_count[index] = count
        self.num_update = max(self.num_update, count)

    def _get_lr(self, index: Key) -> float:
        multiplier = self._multiplier(index, "lr_mult", self.lr_mult)
        return self.learning_rate * multiplier

    def _get_wd(self, index: Key) -> float:
        return self.wd * self._multiplier(index, "wd_mult", self.wd_mult)

    def _multiplier(self, index: Key, attribute: str, given: Mapping[Any, float]) -> float:
        if index in self.param_dict:
            return float(getattr(self.param_dict[index], attribute))
        if index in given:
            return given[index]
        return given.get(self.idx2name[index], 1.0) if index in self.idx2name else 1.0


Class = TypeVar("Class", bound=type[Optimizer])

_registered: dict[str, type[Optimizer]] = {}


def register(klass: Class) -> Class:
    """Let :func:`create` find an optimizer by the lower-cased name of its class. A decorator; an older one is replaced.

    Args:
        klass: The class, a subclass of :class:`Optimizer`.

    Returns:
        The class itself.
    """
    name = klass.__name__.lower()
    if name in _registered:
        warnings.warn(f"optimizer {name!r} is registered again; the new one replaces it", stacklevel=2)
    _registered[name] = klass
    return klass


def create(name: str, **kwargs: Any) -> Optimizer:
    """Make a registered optimizer.

    Args:
        name: Its name in any case: ``sgd``, ``adam``, ``test``, or one given to :func:`register`.
        **kwargs: Its arguments; see its class.

    Raises:
        ValueError: There is none of this name; the text lists those that there are.
    """
    klass = _registered.get(name.lower())
    if klass is None:
        raise ValueError(f"Cannot find optimizer {name}; known are {', '.join(sorted(_registered))}")
    return klass(**kwargs)


def restored(spec: optimizer_state.OptimizerSpec) -> Optimizer:
    """Return an optimizer as it was in another process, without objects that are the program's own there.

    Raises:
        KVStoreError: No optimizer, or no scheduler of the learning rate, of this name is registered here; or the attributes make none.
    """
    if spec.name not in _registered:
        raise KVStoreError(f"the states are of an optimizer {spec.name!r}, which is not registered here")
    schedule = None
    if spec.schedule is not None:
        schedule = lr_schedulers.restored(spec.schedule.name, spec.schedule.settings)
    klass, attributes = _registered[spec.name], spec.attributes()
    _check_attributes(klass, spec.name, attributes, scheduled=schedule is not None)
    optimizer = klass.__new__(klass)
    optimizer.lr_scheduler, optimizer.param_dict = schedule, {}
    vars(optimizer).update(attributes)
    return optimizer


def _check_attributes(
    klass: type[Optimizer], name: str, attributes: Mapping[str, Any], *, scheduled: bool
) -> None:
    what = f"an optimizer {name!r} with these settings"
    objects = sorted(attributes.keys() & set(_OBJECTS))
    if objects:
        raise KVStoreError(f"{what} has {', '.join(objects)}, which are objects")
    attributes = {**attributes, "lr_scheduler": None, "param_dict": {}}
    if scheduled and "lr" in attributes and attributes["lr"] is None:
        attributes["lr"] = 0.0  # MXNet's optimizers have no rate of their own beside a schedule
    optimizer_state.require_like(attributes, Optimizer(), what)
    kinds = {
        "lr_mult": bool | int | float,
        "wd_mult": bool | int | float,
        "_index_update_count": int,
        "idx2name": str,
    }
    for attribute, kind in kinds.items():
        for key, value in attributes[attribute].items():
            if not isinstance(value, kind):
                raise KVStoreError(f"{what} has {attribute}[{key!r}]={value!r}")
    if klass.__module__ == __name__:
        optimizer_state.require_like(attributes, klass(), what)
        return
    # A class of the program's own may need arguments, and may have any attributes; none of them may hide its methods.
    hiding = sorted(attribute for attribute in attributes if callable(getattr(klass, attribute, None)))
    if hiding:
        raise KVStoreError(f"{what} has {', '.join(hiding)}, which are methods of {klass.__name__}")


def portable(optimizer: Optimizer, modules: Collection[str] = ()) -> optimizer_state.OptimizerSpec:
    """Return an optimizer as name and numbers, for :func:`restored` in another process.

    Args:
        optimizer: One of those here, or of a registered class of one of the modules.
        modules: Those that the other process has imported as well.

    Raises:
        KVStoreError: It is of another class of the program's own, its scheduler of the learning rate is, or it has an attribute that is
            neither a number nor text nor a dict of such.
    """
    klass = type(optimizer)
    name = klass.__name__.lower()
    if _registered.get(name) is not klass or klass.__module__ not in (__name__, *modules):
        raise KVStoreError(
            f"servers have the optimizers {', '.join(_OWN)}, not {klass.__name__} of {klass.__module__}: code does not travel. Put it "
            "into a module of its own, with kvstore.optimizer.register, and the module's name into HVDLAB_KV_OPTIMIZERS before the first "
            "store is made, or use a dist_sync store, which runs it on the workers"
        )
    attributes = {
        # A float32 of numpy's, for instance, is none of the plain numbers that travel.
        attribute: value.item() if isinstance(value, np.generic) else value
        for attribute, value in vars(optimizer).items()
        if attribute not in _OBJECTS
    }
    schedule = lr_schedulers.specified(optimizer.lr_scheduler)
    if schedule is None and optimizer.lr_scheduler is not None:
        raise KVStoreError(
            f"servers take as lr_scheduler one of {', '.join(lr_schedulers.KINDS)}, not a "
            f"{type(optimizer.lr_scheduler).__name__}, which would have to travel as code. Call set_learning_rate of the store when the "
            "rate changes, or use a dist_sync store, whose workers run any"
        )
    for key, parameter in optimizer.param_dict.items():
        # The factors travel in place of the parameters, which are objects of the program.
        attributes["lr_mult"] = {**attributes["lr_mult"], key: float(parameter.lr_mult)}
        attributes["wd_mult"] = {**attributes["wd_mult"], key: float(parameter.wd_mult)}
    spec = optimizer_state.specify(name, attributes, schedule)
    missing = sorted(attributes.keys() - spec.settings.keys())
    if missing:
        raise KVStoreError(
            f"{', '.join(missing)} of the optimizer can't be sent to servers: numbers and text can"
        )
    return spec


@register
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum.

    ``v = momentum*v - lr*wd*w - lr*rescale_grad*g``, then ``w = w + v``; with ``clip_gradient`` the last term is
    ``lr*clip(rescale_grad*g)``.

    Args:
        momentum: Part of the last step that is made again.
        lazy_update: With a row-sparse gradient, change its rows only; otherwise all rows decay and go on moving.
        **kwargs: See :class:`Optimizer`.
    """

    def __init__(self, momentum: float = 0.0, lazy_update: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.momentum = momentum
        self.lazy_update = lazy_update

    def create_state(self, index: Key, weight: Array) -> State:
        return np.zeros_like(weight) if self.momentum else None

    def update(self, index: Key, weight: Array, grad: Gradient, state: State) -> None:
        self._update_count(index)
        real = weight.dtype.type
        lr = _constant(self._get_lr(index), weight)
        wd, rescale = _constant(self._get_wd(index), weight), _constant(self.rescale_grad, weight)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if not isinstance(grad, RowSparse):
                for weights, grads, velocities in _blocks(weight, grad, state):
                    self._step(weights, grads, velocities, lr, wd, rescale)
            elif not self.lazy_update:
                self._step(weight, grad.todense(), state, lr, wd, rescale)
            elif state is not None:
                rows, moved = weight[grad.indices], state[grad.indices]
                self._step(rows, grad.data, moved, lr, wd, rescale)
                weight[grad.indices], state[grad.indices] = rows, moved
            else:
                scaled = self._scaled(grad.data, lr, rescale)
                weight[grad.indices] = (real(1) - lr * wd) * weight[grad.indices] - scaled

    def _scaled(self, grad: Array, lr: Any, rescale: Any) -> Array:
        if not self.clip_gradient:
            # The product of the two numbers comes first, as in MXNet: lr * (rescale * grad) rounds differently.
            plain: Array = (lr * rescale) * grad
            return plain
        bound = _constant(self.clip_gradient, grad)
        scaled: Array = rescale * grad
        np.clip(scaled, -bound, bound, out=scaled)
        np.multiply(lr, scaled, out=scaled)
        return scaled

    def _step(
        self, weight: Array, grad: Array, velocity: Array | None, lr: Any, wd: Any, rescale: Any
    ) -> None:
        scaled = self._scaled(grad, lr, rescale)
        decay = (lr * wd) * weight
        if velocity is None:
            step = np.subtract(weight.dtype.type(0), decay, out=decay)
        else:
            np.multiply(_constant(self.momentum, weight), velocity, out=velocity)
            step = np.subtract(velocity, decay, out=velocity)
        np.subtract(step, scaled, out=step)
        np.add(weight, step, out=weight)


@register
class Adam(Optimizer):
    """Adam, with the bias correction in the learning rate.

    ``lr_t = lr*sqrt(1-beta2**t)/(1-beta1**t)`` in double precision, ``t`` counting a key's updates;
    ``g = clip(g*rescale_grad + w*wd)``; ``mean = beta1*mean + (1-beta1)*g``; ``var = beta2*var + (1-beta2)*g*g``;
    ``w = w - lr_t*mean/(sqrt(var) + epsilon)``.

    Args:
        learning_rate: How far a step goes.
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of their squares.
        epsilon: Is added to the root, so that it is never 0.
        lazy_update: With a row-sparse gradient, change its rows only.
        **kwargs: See :class:`Optimizer`.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        lazy_update: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, **kwargs)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.lazy_update = lazy_update

    def create_state(self, index: Key, weight: Array) -> State:
        return (np.zeros_like(weight), np.zeros_like(weight))

    def update(self, index: Key, weight: Array, grad: Gradient, state: State) -> None:
        self._update_count(index)
        t = self._index_update_count[index]
        lr = self._get_lr(index) * math.sqrt(1.0 - self.beta2**t) / (1.0 - self.beta1**t)
        mean, var = state
        with np.errstate(all="ignore"):  # the results are MXNet's, infinities included
            if isinstance(grad, RowSparse) and self.lazy_update:
                rows = grad.indices
                parts = weight[rows], mean[rows], var[rows]
                # MXNet's operator for rows squares a clipped gradient before it multiplies.
                square_first = bool(self.clip_gradient)
                self._step(index, parts[0], grad.data, parts[1], parts[2], lr, square_first)
                weight[rows], mean[rows], var[rows] = parts
            else:
                dense = grad.todense() if isinstance(grad, RowSparse) else grad
                for weights, grads, means, variances in _blocks(weight, dense, mean, var):
                    self._step(index, weights, grads, means, variances, lr)

    def _step(
        self,
        index: Key,
        weight: Array,
        grad: Array,
        mean: Array,
        var: Array,
        lr: float,
        square_first: bool = False,
    ) -> None:
        one = weight.dtype.type(1)
        beta1, beta2 = _constant(self.beta1, weight), _constant(self.beta2, weight)
        rescale, wd = _constant(self.rescale_grad, weight), _constant(self._get_wd(index), weight)
        grad = grad * rescale + weight * wd
        if self.clip_gradient:
            bound = _constant(self.clip_gradient, weight)
            np.clip(grad, -bound, bound, out=grad)
        np.add(beta1 * mean, (one - beta1) * grad, out=mean)
        square = (one - beta2) * (grad * grad) if square_first else (one - beta2) * grad * grad
        np.add(beta2 * var, square, out=var)
        np.subtract(
            weight,
            _constant(lr, weight) * mean / (np.sqrt(var) + _constant(self.epsilon, weight)),
            out=weight,
        )


@register
class NAG(Optimizer):
    """Nesterov's accelerated gradient.

    With ``d = lr*(c(rescale_grad*g) + wd*w)``, where ``c`` clips, and ``v' = momentum*v``: ``w = w - v' + (momentum + 1)*(v' - d)``; then
    ``v = v' - d`` with the decay of the new ``w``, as MXNet computes it. Without momentum ``w = (1 - lr*wd)*w - lr*c(rescale_grad*g)``, of a
    row-sparse gradient's rows only.

    Args:
        momentum: Part of the last step that is made again; with any, gradients are dense.
        **kwargs: See :class:`Optimizer`.
    """

    def __init__(self, momentum: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.momentum = momentum

    def create_state(self, index: Key, weight: Array) -> State:
        return np.zeros_like(weight) if self.momentum else None

    def update(self, index: Key, weight: Array, grad: Gradient, state: State) -> None:
        """Change ``weight`` and ``state`` in place; see :meth:`Optimizer.update`.

        Raises:
            KVStoreError: ``grad`` is row-sparse, and there is momentum.
        """
        self._update_count(index)
        lr, wd = _constant(self._get_lr(index), weight), _constant(self._get_wd(index), weight)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if isinstance(grad, RowSparse):
                if state is not None:
                    raise KVStoreError(
                        f"NAG with momentum can't use the row-sparse gradient of key {index!r}: use SGD",
                        index,
                    )
                rows = weight[grad.indices]
                self._plain_step(rows, grad.data, lr, wd)
                weight[grad.indices] = rows
                return
            for weights, grads, velocities in _blocks(weight, grad, state):
                if velocities is None:
                    self._plain_step(weights, grads, lr, wd)
                else:
                    self._step(weights, grads, velocities, lr, wd)

    def _plain_step(self, weight: Array, grad: Array, lr: Any, wd: Any) -> None:
        rescale = _constant(self.rescale_grad, weight)
        scaled = lr * self._clipped(rescale * grad) if self.clip_gradient else (lr * rescale) * grad
        np.multiply(weight.dtype.type(1) - lr * wd, weight, out=weight)
        np.subtract(weight, scaled, out=weight)

    def _step(self, weight: Array, grad: Array, velocity: Array, lr: Any, wd: Any) -> None:
        momentum, one = _constant(self.momentum, weight), weight.dtype.type(1)
        grad = self._clipped(_constant(self.rescale_grad, weight) * grad)
        np.multiply(momentum, velocity, out=velocity)
        step = (momentum + one) * (velocity - lr * (grad + wd * weight))
        np.subtract(weight, velocity, out=weight)
        np.add(weight, step, out=weight)
        np.subtract(velocity, lr * (grad + wd * weight), out=velocity)

    def _clipped(self, grad: Array) -> Array:
        if not self.clip_gradient:
            return grad
        bound = _constant(self.clip_gradient, grad)
        clipped: Array = np.clip(grad, -bound, bound)
        return clipped


@register
class AdaGrad(Optimizer):
    """AdaGrad: ``g' = c(g*rescale_grad)``; ``h = h + g'*g'``; ``w = w - lr*(g'/sqrt(h + eps) + wd*w)``, where ``c`` clips.

    Args:
        eps: Is added to the sum of squares, so that the root is never 0.
        **kwargs: See :class:`Optimizer`.

    With a row-sparse gradient only its rows change, and ``wd`` has to be 0, as in MXNet.
    """

    def __init__(self, eps: float = 1e-7, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.float_stable_eps = eps

    def create_state(self, index: Key, weight: Array) -> State:
        return np.zeros_like(weight)

    def update(self, index: Key, weight: Array, grad: Gradient, state: State) -> None:
        """Change ``weight`` and ``state`` in place; see :meth:`Optimizer.update`.

        Raises:
            KVStoreError: ``grad`` is row-sparse, and there is weight decay.
        """
        self._update_count(index)
        lr, wd = self._get_lr(index), self._get_wd(index)
        with np.errstate(all="ignore"):
            if isinstance(grad, RowSparse):
                if wd:
                    raise KVStoreError(
                        f"AdaGrad has no weight decay for the row-sparse gradient of key {index!r}: set wd=0",
                        index,
                    )
                rows, squares = weight[grad.indices], state[grad.indices]
                part = self._part(grad.data, squares)
                weight[grad.indices], state[grad.indices] = rows - weight.dtype.type(lr) * part, squares
                return
            for weights, grads, squares in _blocks(weight, grad, state):
                real = weights.dtype.type
                step = (self._part(grads, squares) + weights * real(wd)) * real(-lr)
                np.add(weights, step, out=weights)

    def _part(self, grad: Array, squares: Array) -> Array:
        real = grad.dtype.type
        grad = grad * real(self.rescale_grad)
        if self.clip_gradient:
            np.clip(grad, real(-self.clip_gradient), real(self.clip_gradient), out=grad)
        np.add(squares, grad * grad, out=squares)
        part: Array = grad / np.sqrt(squares + real(self.float_stable_eps))
        return part


@register
class RMSProp(Optimizer):
    """RMSProp. ``g' = c(rescale_grad*g + wd*w)``, where ``c`` clips; ``n = (1 - gamma1)*g'*g' + gamma1*n``.

    Then ``w = w - lr*g'/sqrt(n + epsilon)`` (Tieleman and Hinton); with ``centered`` (Graves) ``m = (1 - gamma1)*g' + gamma1*m``,
    ``d = gamma2*d - lr*g'/sqrt(n - m*m + epsilon)`` and ``w = w + d``.

    Args:
        learning_rate: How far a step goes.
        gamma1: Decay of the mean of squares, and of that of gradients.
        gamma2: With ``centered``: part of the last step that is made again.
        epsilon: Is added under the root.
        centered: Whether the variance of the gradients is taken in place of the mean of their squares.
        clip_weights: Bound of each weight's size; ``None`` or 0 for none.
        **kwargs: See :class:`Optimizer`.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        gamma1: float = 0.9,
        gamma2: float = 0.9,
        epsilon: float = 1e-8,
        centered: bool = False,
        clip_weights: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, **kwargs)
        self.gamma1, self.gamma2, self.epsilon = gamma1, gamma2, epsilon
        self.centered, self.clip_weights = centered, clip_weights

    def create_state(self, index: Key, weight: Array) -> State:
        return tuple(np.zeros_like(weight) for _ in range(3 if self.centered else 1))

    def update(self, index: Key, weight: Array, grad: Gradient, state: State) -> None:
        self._update_count(index)
        lr, wd = _constant(self._get_lr(index), weight), _constant(self._get_wd(index), weight)
        dense = grad.todense() if isinstance(grad, RowSparse) else grad
        with np.errstate(all="ignore"):
            for weights, grads, *parts in _blocks(weight, dense, *state):
                self._step(weights, grads, parts, lr, wd)

    def _step(self, weight: Array, grad: Array, parts: list[Array], lr: Any, wd: Any) -> None:
        one, gamma1 = weight.dtype.type(1), _constant(self.gamma1, weight)
        epsilon = _constant(self.epsilon, weight)
        grad = _constant(self.rescale_grad, weight) * grad + wd * weight
        if self.clip_gradient:
            bound = _constant(self.clip_gradient, weight)
            np.clip(grad, -bound, bound, out=grad)
        squares = parts[0]
        if self.centered:
            _, mean, step = parts
            np.add((one - gamma1) * grad * grad, gamma1 * squares, out=squares)
            np.add((one - gamma1) * grad, gamma1 * mean, out=mean)
            move = lr * grad / np.sqrt(squares - mean * mean + epsilon)
            np.subtract(_constant(self.gamma2, weight) * step, move, out=step)
            np.add(weight, step, out=weight)
        else:
            np.add((one - gamma1) * (grad * grad), gamma1 * squares, out=squares)
            np.subtract(weight, lr * (grad / np.sqrt(squares + epsilon)), out=weight)
        if self.clip_weights:
            bound = _constant(self.clip_weights, weight)
            np.clip(weight, -bound, bound, out=weight)


@register
class Test(Optimizer):
    """``w = w + g*rescale_grad``: for tests, since sums of small integers are exact."""

    __test__: ClassVar[bool] = False  # pytest takes classes of this name for its own

    def create_state(self, index: Key, weight: Array) -> State:
        return np.zeros_like(weight)

    def update(self, index: Key, weight: Array, grad: Gradient, state: State) -> None:
        dense = grad.todense() if isinstance(grad, RowSparse) else grad
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(weight, dense * weight.dtype.type(self.rescale_grad), out=weight)
        state[...] = weight


_OWN = tuple(_registered)


class Updater:
    """Runner of an optimizer on one key at a time, which keeps its states.

    Args:
        optimizer: The optimizer.

    Attributes:
        optimizer: The optimizer; changes of its learning rate apply from the next call on.
        states: Its states by key; one is made at the key's first call.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.states: dict[Key, State] = {}

    def __call__(self, key: Key, grad: Gradient, weight: Array) -> None:
        """Change ``weight`` in place by its gradient."""
        if key not in self.states:
            self.states[key] = self.optimizer.create_state_multi_precision(key, weight)
        self.optimizer.update_multi_precision(key, weight, grad, self.states[key])

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """Return all states as bytes, without pickle; with ``dump_optimizer`` also the optimizer's settings and counts.

        A ``param_dict`` is left out, and so is an ``lr_scheduler`` that is none of :mod:`hvdlab.kvstore.lr_scheduler`: they are objects
        of the program.

        Raises:
            KVStoreError: A state is neither ``None`` nor made of arrays.
        """
        spec = None
        if dump_optimizer:
            attributes = {name: value for name, value in vars(self.optimizer).items() if name not in _OBJECTS}
            schedule = lr_schedulers.specified(self.optimizer.lr_scheduler)
            spec = optimizer_state.specify(type(self.optimizer).__name__.lower(), attributes, schedule)
        return optimizer_state.encode(self.states, spec)

    def set_states(self, states: bytes) -> None:
        """Load the states that :meth:`get_states` returned; with the optimizer in it, learning rate and counts go on exactly.

        The parameters stay, and so does a scheduler of the learning rate if none is among the bytes.

        Raises:
            KVStoreError: These are no such bytes, or their optimizer is not registered here. Nothing has changed then.
        """
        found, spec = optimizer_state.decode(states)
        if spec is not None:
            optimizer = restored(spec)
            optimizer.param_dict = self.optimizer.param_dict
            if spec.schedule is None:
                optimizer.lr_scheduler = self.optimizer.lr_scheduler
            self.optimizer = optimizer
        self.states = found


def get_updater(optimizer: Optimizer) -> Updater:
    """Return an updater for :meth:`hvdlab.kvstore.KVStore._set_updater` that runs this optimizer.

    Args:
        optimizer: The optimizer, which the updater owns from now on.
    """
    return Updater(optimizer)
