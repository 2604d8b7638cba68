"""Collectives as operations: in functions, graphs of TensorFlow 1 and tf.data. The conformance suite tests the eager forms."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.bindings.test_arguments import ARGUMENTS
from hvdlab.collectives.types import DType
from support.ranks.resident import Ranks

MANY = 40
"""Operations that wait at the same time: more than TensorFlow has threads."""


def _modules() -> tuple[Any, Any]:
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    return tf, hvd


def _total(hvd: Any) -> float:
    """Return the sum of the ranks' numbers, counted from 1."""
    found: float = hvd.size() * (hvd.size() + 1) / 2
    return found


# -- values -----------------------------------------------------------------------------------------------------------


def every_dtype() -> None:
    tf, hvd = _modules()
    given = []
    for dtype in DType:
        for shape in ((), (0,), (3,), (2, 0, 3), (40_000,)):
            given.append(tf.cast(tf.ones(shape), dtype.label))

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def reduced() -> Any:
        sums = [hvd.allreduce(each, op=hvd.Max if each.dtype == tf.bool else hvd.Sum) for each in given]
        return sums, hvd.grouped_allreduce(given, op=hvd.Max)

    sums, largest = reduced()
    for each, output, top in zip(given, sums, largest, strict=True):
        factor = 1 if each.dtype == tf.bool else hvd.size()
        assert output.dtype == top.dtype == each.dtype
        assert output.shape == top.shape == each.shape
        assert np.array_equal(tf.cast(output, tf.float64), factor * tf.cast(each, tf.float64))
        assert np.array_equal(tf.cast(top, tf.float64), tf.cast(each, tf.float64))


def unsigned_shorts() -> None:
    """The core has no uint16, so collectives that only move data carry them as int16."""
    tf, hvd = _modules()
    x = tf.cast(tf.fill([hvd.size(), 1], 60_000 + hvd.rank()), tf.uint16)
    last = 60_000 + hvd.size() - 1
    calls: list[Callable[[], Any]] = [
        lambda: hvd.allgather(x),
        lambda: hvd.grouped_allgather([x, tf.ones(1), x])[2],
        lambda: hvd.broadcast(x, hvd.size() - 1),
        lambda: hvd.alltoall(x, splits=[1] * hvd.size())[0],
        lambda: hvd.broadcast_([tf.Variable(x)], hvd.size() - 1)[0].read_value(),
    ]
    for call in calls:
        assert call().dtype == tf.uint16
        assert int(np.max(call().numpy())) == last
    inside = tf.function(lambda: hvd.allgather(x), autograph=False)()
    assert (inside.dtype, int(np.max(inside.numpy()))) == (tf.uint16, last)
    with pytest.raises(NotImplementedError, match="cast it to int32 to reduce it"):
        hvd.allreduce(x)


def in_process_sets() -> None:
    """Run every operation and its gradient in a process set, while ranks outside run another operation."""
    tf, hvd = _modules()
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    mine, other = sets[hvd.rank()], sets[hvd.rank() - 1]
    x = tf.fill([1, 2], float(hvd.rank()))
    calls: list[Callable[[Any], Any]] = [
        lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=mine),
        lambda x: hvd.grouped_allreduce([x, x], process_set=mine)[0],
        lambda x: hvd.allgather(x, process_set=mine),
        lambda x: hvd.broadcast(x, hvd.rank(), process_set=mine),
        lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=mine),
        lambda x: hvd.grouped_reducescatter([x], process_set=mine)[0],
        lambda x: hvd.alltoall(x, process_set=mine),
    ]
    for call in calls:
        if hvd.rank():  # one time more than rank 0, so that the ranks run different ones
            call(x)

        def derivative(call: Any = call) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(call(x) * 3.0)
            return loss, tape.gradient(loss, x)

        for loss, slope in (derivative(), tf.function(derivative, autograph=False)()):
            np.testing.assert_allclose([float(loss), *np.ravel(slope)], [6.0 * hvd.rank(), 3.0, 3.0])
    slices = tf.IndexedSlices(x, tf.constant([0], tf.int64), tf.constant([4, 2], tf.int64))
    assert hvd.allreduce(slices, process_set=mine).indices.numpy().tolist() == [0]
    assert int(hvd.size_op(mine.process_set_id)) == 1
    assert int(hvd.process_set_included_op(mine.process_set_id)) == 1
    assert int(hvd.process_set_included_op(other.process_set_id)) == 0
    with pytest.raises(ValueError, match="process set"):
        hvd.allreduce(x, process_set=other)
    for each in sets:
        assert hvd.remove_process_set(each)


def every_operation() -> None:
    tf, hvd = _modules()
    rank, size = hvd.rank(), hvd.size()

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def run(x: Any) -> dict[str, Any]:
        ragged = hvd.allgather(tf.fill([rank + 1, 2], rank))
        assert ragged.shape.as_list() == [None, 2]
        return {
            "average": hvd.allreduce(x),
            "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.1, postscale_factor=10.0),
            "half": hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16),
            "grouped": hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum),
            "ragged": ragged,
            "gathered": hvd.grouped_allgather([x, tf.fill([1], rank)]),
            "broadcast": hvd.broadcast(x, size - 1),
            "scattered": hvd.reducescatter(tf.range(2.0 * size + 1), op=hvd.Sum),
            "scattered group": hvd.grouped_reducescatter([tf.ones([size])], op=hvd.Average),
            "exchanged": hvd.alltoall(tf.fill([size, 2], rank)),
            "exchanged unevenly": hvd.alltoall(tf.fill([size], rank), splits=tf.constant([0] * (size - 1) + [size])),
            "slices": hvd.allreduce(tf.IndexedSlices(x[None] * 1.0, tf.constant([rank]), tf.constant([size, 2])), op=hvd.Sum),
            "world": [hvd.size_op(), hvd.rank_op(), hvd.local_size_op(), hvd.local_rank_op(), hvd.process_set_included_op()],
        }  # fmt: skip

    mine = np.array([1.0, 2.0]) * (rank + 1)
    total = np.array([1.0, 2.0]) * _total(hvd)
    outputs = run(tf.constant(mine, tf.float64))
    slices = outputs.pop("slices")
    found = tf.nest.map_structure(lambda tensor: tensor.numpy(), outputs)
    rows = np.concatenate([np.full((r + 1, 2), r) for r in range(size)])
    last = rank == size - 1
    expected = {
        "average": total / size,
        "scaled": total,
        "half": total,
        "grouped": [total, 2 * total],
        "ragged": rows,
        "gathered": [np.concatenate([np.array([1.0, 2.0]) * (r + 1) for r in range(size)]), np.arange(size)],
        "broadcast": np.array([1.0, 2.0]) * size,
        "scattered": np.array_split(np.arange(2.0 * size + 1) * size, size)[rank],
        "scattered group": [np.ones(1)],
        "exchanged": np.repeat(np.arange(size), 2).reshape(size, 2),
        "exchanged unevenly": (
            np.repeat(np.arange(size), size) if last else np.empty(0),
            [size * last] * size,
        ),
        "world": [size, rank, size, rank, 1],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(
            np.concatenate([np.ravel(x) for x in found[name]]) if isinstance(values, list | tuple) else found[name],
            np.concatenate([np.ravel(x) for x in values]) if isinstance(values, list | tuple) else values,
            err_msg=name,
        )  # fmt: skip
    assert slices.indices.numpy().tolist() == list(range(size))
    assert slices.values.numpy().tolist() == [[r + 1.0, 2 * (r + 1.0)] for r in range(size)]


def integer_slices() -> None:
    """Check that an average of integer slices is not rounded before it is added up; scale factors are not rounded to
    the integers' dtype."""
    tf, hvd = _modules()
    size = hvd.size()

    def slices(dtype: Any) -> Any:
        return tf.IndexedSlices(tf.constant([[3, 5]], dtype), tf.constant([0]), tf.constant([1, 2]))

    def reduced() -> dict[str, Any]:
        found = {}
        for dtype, quotient in ((tf.int32, tf.float64), (tf.int64, tf.float64), (tf.int8, tf.float32)):
            dense, mixed, last = hvd.grouped_allreduce([tf.constant([4]), slices(dtype), tf.constant([6.0])])
            for each in (hvd.allreduce(slices(dtype)), mixed, *hvd.grouped_allreduce([slices(dtype)] * 2)):
                assert each.values.dtype == quotient
            found[f"mixed {dtype.name}"] = tf.convert_to_tensor(mixed)
            found[f"beside {dtype.name}"] = tf.stack([tf.cast(dense[0], tf.float32), last[0]])
            halved = hvd.allreduce(slices(dtype), op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0)
            assert halved.values.dtype == dtype
            found[f"scaled {dtype.name}"] = tf.convert_to_tensor(halved)
            scaled = hvd.allreduce(slices(dtype), prescale_factor=0.5)
            found[f"half {dtype.name}"] = 2 * tf.convert_to_tensor(scaled)
            halves = hvd.allreduce(slices(dtype), op=hvd.Sum, postscale_factor=0.5)
            found[f"cut {dtype.name}"] = tf.convert_to_tensor(halves)
        return found

    for found in (reduced(), tf.function(reduced, autograph=False)()):
        for name, values in found.items():
            expectations: dict[str, Any] = {
                "mixed": [[3, 5]], "half": [[3, 5]], "beside": [4, 6],
                "scaled": [[3 * size, 5 * size]], "cut": [[1 * size, 2 * size]],
            }  # fmt: skip
            np.testing.assert_allclose(values, expectations[name.split()[0]], err_msg=name)


def any_order() -> None:
    tf, hvd = _modules()

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def run(x: Any) -> list[Any]:
        order = range(MANY) if hvd.rank() % 2 == 0 else reversed(range(MANY))
        outputs = {i: hvd.allreduce(x + i, op=hvd.Sum, name=f"t{i}") for i in order}
        return [outputs[i] for i in range(MANY)]

    for _ in range(3):
        found = [float(output) for output in run(tf.constant(1.0))]
        assert found == [hvd.size() * (1.0 + i) for i in range(MANY)]


def executions() -> None:
    """Check that operations on constants are not folded, and equal ones not merged: every rank executes them each
    time."""
    tf, hvd = _modules()

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def run() -> Any:
        one = tf.constant(1.0)
        return hvd.allreduce(one, op=hvd.Sum), hvd.allreduce(one, op=hvd.Sum)

    concrete = run.get_concrete_function()
    names = [
        operation.get_attr("call")
        for operation in concrete.graph.get_operations()
        if operation.type == "HvdlabAllreduce"
    ]
    assert len(set(names)) == 2
    for _ in range(3):
        assert [float(each) for each in run()] == [hvd.size()] * 2
    if hvd.rank() == 0:  # each execution waits for one of rank 1's
        run()
        run()
    else:
        run()
        run()


def sessions() -> None:
    tf, hvd = _modules()
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=float(hvd.rank()))
        given = v1.placeholder(tf.float32, [None])
        total = hvd.allreduce(given, op=hvd.Sum)
        unknown = hvd.allreduce(v1.placeholder_with_default(tf.ones(2), None), op=hvd.Sum)
        (gradient,) = tf.gradients(tf.reduce_sum(total * total), given)
        everywhere = hvd.broadcast_global_variables(0)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            values, slopes = session.run([total, gradient], {given: [1.0, 2.0]})
            session.run(everywhere)
            assert session.run(variable) == 0.0
            assert session.run(unknown).tolist() == [hvd.size()] * 2
    assert values.tolist() == [hvd.size(), 2 * hvd.size()]
    assert slopes.tolist() == [2.0 * hvd.size() ** 2, 4.0 * hvd.size() ** 2]
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=float(hvd.rank()))
        hooks = [hvd.BroadcastGlobalVariablesHook(1)]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            assert session.run(variable) == 1.0


def pipelines() -> None:
    tf, hvd = _modules()
    data = tf.data.Dataset.range(5).map(lambda i: hvd.allreduce(i, op=hvd.Sum))
    assert [int(i) for i in data] == [i * hvd.size() for i in range(5)]


def variables() -> None:
    tf, hvd = _modules()
    given = [
        tf.Variable([float(hvd.rank())] * 3),
        tf.Variable(hvd.rank(), dtype=tf.int64),
        tf.Variable(False),
    ]
    assert hvd.broadcast_(given, 1) == given
    assert [given[0].numpy().tolist(), int(given[1])] == [[1.0] * 3, 1]
    given[0].assign([float(hvd.rank())] * 3)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def inside() -> None:
        hvd.broadcast_variables(given, 0)

    inside()
    assert given[0].numpy().tolist() == [0.0] * 3
    given[1].assign(hvd.rank())
    hvd.broadcast_variables(iter(given), root_rank=0)
    assert int(given[1]) == 0
    assert hvd.broadcast_object({"r": hvd.rank()}, 1) == {"r": 1}
    assert hvd.broadcast_object_fn(root_rank=0)(hvd.rank()) == 0
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    assert hvd.refs_to_vars(hvd.vars_to_refs(given))[0] is given[0]


def names() -> None:
    tf, hvd = _modules()
    from hvdlab.tensorflow.kernels import decoded

    with tf.Graph().as_default() as graph, tf.name_scope("scope"):
        x = tf.constant(1.0, name="x")
        hvd.allreduce(x, name="loss")
        hvd.allreduce(x, name="loss")
        hvd.allreduce(x, name="bare", ignore_name_scope=True)
        hvd.allreduce(x)
        calls = [
            decoded(each.get_attr("call"))
            for each in graph.get_operations()
            if each.type == "HvdlabAllreduce"
        ]
    assert [call.name for call in calls] == [
        "scope/loss",
        "scope/loss_1",
        "bare",
        "scope/HvdlabAllreduce_scope/x_0",
    ]
    assert all(re.fullmatch(r"test_operations\.py:\d+", call.site) for call in calls), calls


def signatures() -> None:
    import inspect

    _, hvd = _modules()
    for kind, arguments in ARGUMENTS.items():
        forms = [kind, f"grouped_{kind}"] if hasattr(hvd, f"grouped_{kind}") else [kind]
        for form in forms:
            parameters = list(inspect.signature(getattr(hvd, form)).parameters)
            assert set(arguments) <= set(parameters), (form, parameters)
            text = getattr(hvd, form).__doc__
            for section in (*(f"\n    {each}: " for each in parameters), "\nReturns:\n", "\nRaises:\n"):
                assert text.count(section) == 1, (form, section)


def joined() -> None:
    tf, hvd = _modules()

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    for _ in range(2 + hvd.rank()):
        step(tf.ones(3))
    assert hvd.join() == 1
    last = tf.function(hvd.join)()
    assert int(last) in range(hvd.size())


@pytest.mark.parametrize(
    "function",
    [every_dtype, unsigned_shorts, in_process_sets, every_operation, integer_slices, any_order, executions, sessions, pipelines, variables, names, signatures, joined],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_operations(two: Ranks, function: Callable[[], None]) -> None:
    two.run(function, timeout=60)


@pytest.mark.parametrize(
    "function", [every_operation, integer_slices, any_order], ids=lambda function: function.__name__
)
def test_operations_in_other_worlds(others: Ranks, function: Callable[[], None]) -> None:
    others.run(function, timeout=60)


# -- gradients --------------------------------------------------------------------------------------------------------


def gradients() -> None:
    """Check that gradients are the same outside of functions and inside, and follow Horovod's conventions."""
    tf, hvd = _modules()
    rank, size = hvd.rank(), hvd.size()
    x = tf.constant((np.arange(2.0 * size).reshape(size, 2) + 1) * (rank + 1))
    every = [(np.arange(2.0 * size).reshape(size, 2) + 1) * (r + 1) for r in range(size)]
    total = np.sum(every, axis=0)

    def losses(x: Any) -> dict[str, Any]:
        return {
            "sum": hvd.allreduce(x, op=hvd.Sum),
            "average": hvd.allreduce(x),
            "group": hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum),
            "gathered": hvd.allgather(x[: rank + 1]),
            "gathered group": hvd.grouped_allgather([x, x[:1]]),
            "broadcast": hvd.broadcast(x, 0),
            "scattered": hvd.reducescatter(x, op=hvd.Sum),
            "exchanged": hvd.alltoall(x, splits=[1] * size)[0],
            "smallest": hvd.allreduce(x, op=hvd.Min),
            "largest": hvd.allreduce(x, op=hvd.Max),
            "product": hvd.allreduce(x, op=hvd.Product),
            "adasum": hvd.allreduce(x, op=hvd.Adasum),
        }

    def derivatives(x: Any) -> dict[str, Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            squares = {
                name: tf.add_n([tf.reduce_sum(each * each) / 2 for each in tf.nest.flatten(outputs)])
                for name, outputs in losses(x).items()
            }
        return {name: tape.gradient(square, x) for name, square in squares.items()}

    outside = derivatives(x)
    inside = tf.function(derivatives, autograph=False)(x)
    product = np.prod(every, axis=0)
    expected = {
        "sum": total * size,
        "average": total / size,
        "group": 5 * total * size,
        "broadcast": every[0] * (rank == 0),
        "smallest": every[0] * size * (rank == 0),
        "largest": every[-1] * size * (rank == size - 1),
        "product": size * product * product / every[rank],
        "exchanged": every[rank],
        "scattered": total * size,
    }
    for name, values in outside.items():
        np.testing.assert_allclose(values, inside[name], err_msg=name)
        if name in expected:
            np.testing.assert_allclose(values, expected[name], err_msg=name)
    own = np.zeros_like(every[0])
    own[: rank + 1] = every[rank][: rank + 1]
    np.testing.assert_allclose(outside["gathered"], own)


def twice() -> None:
    """Check the gradient of a gradient."""
    tf, hvd = _modules()

    def second(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) ** 3)
            slope = inner.gradient(y, x)
        return outer.gradient(slope, x)

    x = tf.constant([1.0, 2.0])
    n = hvd.size()
    for found in (second(x), tf.function(second, autograph=False)(x)):
        np.testing.assert_allclose(found, 6 * n * x * n * n)


@pytest.mark.parametrize("function", [gradients, twice], ids=lambda function: function.__name__)
def test_gradients(two: Ranks, function: Callable[[], None]) -> None:
    two.run(function, timeout=60)


# -- without operations -----------------------------------------------------------------------------------------------


def fallback() -> None:
    """Check that if operations can't be registered, collectives in graphs run through numpy_function, and a warning
    reports it."""
    import warnings

    tf, _ = _modules()
    from hvdlab.tensorflow import kernels

    usable, kernels.usable = kernels.usable, lambda: "TensorFlow's library has no TF_Nothing"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            every_operation()
            gradients()
            sessions()
            joined()
    finally:
        kernels.usable = usable
    texts = {str(each.message) for each in caught if each.category is RuntimeWarning}
    assert any("has no TF_Nothing" in text and "same order" in text for text in texts), texts
    with tf.Graph().as_default() as graph:
        every = [operation.type for operation in graph.get_operations()]
    assert "HvdlabAllreduce" not in every


def test_without_operations(two: Ranks) -> None:
    two.run(fallback, timeout=100)


def not_found() -> None:
    """Check that if TensorFlow's library lacks a function, the error names it; nothing crashes."""
    from hvdlab.tensorflow import kernels

    found = kernels.CApi()
    with pytest.raises(kernels.Unavailable, match="has no TF_Nothing"):
        found._function("TF_Nothing", None)


def test_what_the_library_lacks(two: Ranks) -> None:
    two.run(not_found, ranks=[0])


# -- graphs from files ------------------------------------------------------------------------------------------------


def saved(folder: Path) -> None:
    tf, hvd = _modules()

    class Reducing(tf.Module):  # type: ignore[misc,name-defined]
        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)  # type: ignore[untyped-decorator]
        def reduced(self, x: Any) -> Any:
            return hvd.allreduce(x, op=hvd.Sum, name="saved")

    tf.saved_model.save(Reducing(), str(folder / str(hvd.rank())))


def loaded(folder: Path, rank: int) -> None:
    """Load a graph with operations into a process that has made none, and is no rank yet."""
    tf, hvd = _modules()
    model = tf.saved_model.load(str(folder / str(rank)))
    with pytest.raises(ValueError, match=r"before hvd\.init\(\)"):
        model.reduced(tf.ones(2))
    hvd.init()
    assert model.reduced(tf.ones(2)).numpy().tolist() == [hvd.size()] * 2
    with pytest.raises(hvd.HorovodInternalError, match="`saved`: the ranks disagree"):
        model.reduced(tf.ones(1 + hvd.rank()))


def threads_of_kernels() -> list[tuple[int, bool]]:
    """Return for each of many kernels the thread that it began on, and whether Python met that thread for the first
    time."""
    tf, hvd = _modules()
    from hvdlab.tensorflow import kernels

    met = threading.local()
    found = []
    run = kernels._run

    def noticed(execution: Any, call: Any) -> None:
        found.append((threading.get_native_id(), not hasattr(met, "before")))
        met.before = True
        run(execution, call)

    reduced = tf.function(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, name="threads"), autograph=False)
    reduced(tf.ones(3))
    kernels._run = noticed
    try:
        for _ in range(3 * MANY):
            reduced(tf.ones(3))
    finally:
        kernels._run = run
    return found


def test_a_thread_of_tensorflows_is_made_known_to_python_once(two: Ranks) -> None:
    for found in two.run(threads_of_kernels, timeout=60):
        assert len(found) == 3 * MANY
        assert sum(first for _, first in found) == len({thread for thread, _ in found})


def test_a_graph_that_was_saved_is_loaded_elsewhere(two: Ranks, tmp_path: Path) -> None:
    two.run(saved, tmp_path, timeout=60)
    with Ranks(2, init=False, imports=["hvdlab.tensorflow"]) as ranks:
        ranks.run(loaded, per_rank=[(tmp_path, 0), (tmp_path, 1)], timeout=60)
