"""One frontend and many ranks: the pure part, with ranks that are made up."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hvdlab.kernel_ext.notebook.debugger.dap_state import (
    FIRST,
    AskLocal,
    CloseRank,
    Effect,
    Event,
    Expired,
    Json,
    LocalReplied,
    OpenRank,
    Publish,
    RankGone,
    RankOpened,
    RankSaid,
    Remind,
    Reminded,
    ReplyToFrontend,
    Requested,
    SetDebuggedRanks,
    ToRank,
)
from hvdlab.kernel_ext.notebook.debugger.multiplexer import Multiplexer

CELLS = "/tmp/ipykernel_1/"
CELL = CELLS + "7.py"
LOCAL_THREAD = 1


class Room:
    """Frontend, a kernel and ranks whose debug servers answer as debugpy's do."""

    def __init__(self) -> None:
        self.mux = Multiplexer({"justMyCode": False}, CELLS, {CELL: True})
        self.keys = iter(range(1, 1 << 20))
        self.replies: dict[int, Json] = {}
        self.events: list[Json] = []
        self.local: list[Json] = []
        self.asked: dict[int, list[Json]] = {}
        self.silent: set[int] = set()
        self.taken: set[int] = set()  # their debug servers can't be had
        self.opened: set[int] = set()
        self.at: dict[int, int] = {}  # line that a rank has stopped at

    def tell(self, event: Event) -> None:
        self.do(self.mux.handle(event))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ReplyToFrontend):
                assert effect.key not in self.replies, "answered twice"
                self.replies[effect.key] = effect.response
            elif isinstance(effect, Publish):
                self.events.append(effect.event)
            elif isinstance(effect, AskLocal):
                self.local.append(effect.request)
                body = {
                    "breakpoints": [],
                    "threads": [{"id": LOCAL_THREAD, "name": "MainThread"}],
                    "stackFrames": [],
                }
                self.tell(LocalReplied(effect.key, {"type": "response", "success": True, "body": body}))
            elif isinstance(effect, OpenRank):
                if effect.rank not in self.taken:
                    self.opened.add(effect.rank)
                    self.tell(RankOpened(effect.rank))
            elif isinstance(effect, Remind):
                self.reminders += 1
            elif isinstance(effect, CloseRank):
                self.opened.discard(effect.rank)
                self.at.pop(effect.rank, None)
            else:
                self.answer(effect)

    def answer(self, order: ToRank) -> None:
        rank, message = order.rank, order.message
        assert rank in self.opened, "said to a rank that nobody has opened"
        self.asked.setdefault(rank, []).append(message)
        if rank in self.silent:
            return
        command, arguments = message["command"], message["arguments"]
        body: Json = {}
        if command == "threads":
            body = {"threads": [{"id": 3, "name": "MainThread"}, {"id": 4, "name": "loader"}]}
        elif command == "setBreakpoints":
            body = {
                "breakpoints": [
                    {"verified": True, "id": 9, "line": one["line"]} for one in arguments["breakpoints"]
                ]
            }
        elif command == "stackTrace":
            assert arguments["threadId"] == 3
            body = {
                "stackFrames": [
                    {"id": 50, "name": "f", "line": self.at[rank], "source": {"path": CELL}},
                    {"id": 51, "name": "<module>", "line": 1, "source": {"path": CELL}},
                    {"id": 52, "name": "_run_code", "line": 9, "source": {"path": "/x/runner.py"}},
                ]
            }
        elif command == "scopes":
            assert arguments["frameId"] in (50, 51)
            body = {"scopes": [{"name": "Locals", "variablesReference": 70 + arguments["frameId"]}]}
        elif command == "variables":
            assert arguments["variablesReference"] in (120, 121)
            body = {"variables": [{"name": "x", "value": str(rank)}, {"name": "_i3", "value": "''"}]}
        reply = {
            "type": "response",
            "request_seq": message["seq"],
            "command": command,
            "success": True,
            "body": body,
        }
        self.tell(RankSaid(rank, reply))
        if command in ("continue", "next"):
            self.at.pop(rank, None)
            self.say(rank, "continued", threadId=3, allThreadsContinued=False)

    def say(self, rank: int, event: str, **body: Any) -> None:
        self.tell(RankSaid(rank, {"type": "event", "event": event, "body": body}))

    def stop(self, rank: int, line: int = 2) -> None:
        self.at[rank] = line
        self.say(rank, "stopped", threadId=3, reason="breakpoint", allThreadsStopped=False)

    def ask(self, command: str, **arguments: Any) -> Json:
        key = next(self.keys)
        self.tell(Requested(key, {"type": "request", "seq": key, "command": command, "arguments": arguments}))
        if command == "attach":
            self.do(self.mux.wait_for(key, self.ranks))
        if key not in self.replies:
            self.tell(Expired(key))
        return self.replies[key]

    ranks: tuple[int, ...] = ()
    reminders = 0

    def start(self, *ranks: int) -> Room:
        self.ranks = ranks
        self.ask("initialize", adapterID="lab")
        assert self.ask("attach")["success"]
        return self

    def stopped_events(self) -> list[Json]:
        return [one["body"] for one in self.events if one["event"] == "stopped"]

    def commands(self, rank: int) -> list[str]:
        return [one["command"] for one in self.asked[rank]]


def test_nothing_is_said_to_ranks_before_the_debugger_is_on() -> None:
    room = Room()
    room.tell(SetDebuggedRanks((0, 1)))
    room.ask("debugInfo")
    assert not room.asked
    assert not room.opened


def test_a_rank_that_comes_later_is_told_everything() -> None:
    room = Room().start(0)
    room.ask("setBreakpoints", source={"path": CELL}, breakpoints=[{"line": 2}])
    room.ask("setExceptionBreakpoints", filters=["uncaught"])
    room.tell(SetDebuggedRanks((0, 1)))
    assert room.commands(1) == [
        "initialize",
        "attach",
        "setBreakpoints",
        "setExceptionBreakpoints",
        "threads",
        "configurationDone",
    ]
    assert not room.mux.pending


def test_breakpoints_of_a_cell_for_ranks_are_not_the_kernels() -> None:
    room = Room().start(0, 1)
    reply = room.ask("setBreakpoints", source={"path": CELL}, breakpoints=[{"line": 2}])
    assert reply["body"]["breakpoints"] == [{"verified": True, "id": 9, "line": 2, "source": {"path": CELL}}]
    assert room.local[-1]["arguments"]["breakpoints"] == []
    assert room.ask("debugInfo")["body"]["breakpoints"] == [{"source": CELL, "breakpoints": [{"line": 2}]}]
    room.ask("setBreakpoints", source={"path": "/home/me/train.py"}, breakpoints=[{"line": 5}])
    assert room.local[-1]["arguments"]["breakpoints"] == [{"line": 5}]


def test_ranks_are_threads_and_jupyterlab_sees_all_their_frames() -> None:
    room = Room().start(0, 1, 2)
    room.stop(2)
    room.stop(0)
    threads = [body["threadId"] for body in room.stopped_events()]
    frames = room.ask("stackTrace", threadId=threads[-1])["body"]["stackFrames"]
    # The first that stopped comes first; the kernel's own frames are left out.
    assert [one["name"] for one in frames] == [
        "rank 2: f",
        "rank 2: <module>",
        "rank 0: f",
        "rank 0: <module>",
    ]
    scopes = room.ask("scopes", frameId=frames[2]["id"])["body"]["scopes"]
    variables = room.ask("variables", variablesReference=scopes[0]["variablesReference"])["body"]["variables"]
    assert variables == [{"name": "x", "value": "0"}]
    assert set(room.ask("debugInfo")["body"]["stoppedThreads"]) == set(threads)
    # From now on rank 0 is looked at.
    frames = room.ask("stackTrace", threadId=threads[0])["body"]["stackFrames"]
    assert frames[0]["name"] == "rank 0: f"


def test_a_frontend_that_knows_threads_gets_their_own_frames() -> None:
    room = Room().start(0, 1)
    listed = room.ask("threads")["body"]["threads"]
    assert [one["name"] for one in listed] == [
        "MainThread",
        "rank 0: MainThread",
        "rank 0: loader",
        "rank 1: MainThread",
        "rank 1: loader",
    ]
    room.stop(0)
    room.stop(1)
    frames = room.ask("stackTrace", threadId=listed[3]["id"])["body"]["stackFrames"]
    assert [one["name"] for one in frames] == ["f", "<module>"]
    room.ask("next", threadId=listed[3]["id"])
    assert "next" in room.commands(1)
    assert "next" not in room.commands(0)


def test_going_on_is_for_all_and_stepping_for_those_at_the_same_line() -> None:
    room = Room().start(0, 1, 2)
    for rank, line in ((0, 2), (1, 2), (2, 5)):
        room.stop(rank, line)
    thread = room.stopped_events()[0]["threadId"]
    room.ask("stackTrace", threadId=thread)
    room.ask("next", threadId=thread)
    assert room.mux.stopped == (2,)
    assert room.reminders == 1
    shown = len(room.stopped_events())
    room.stop(1, 3)  # is kept back for the one that is looked at
    assert len(room.stopped_events()) == shown
    room.stop(0, 3)
    assert [one["description"] for one in room.stopped_events()[shown:]] == [
        "rank 1: breakpoint",
        "rank 0: breakpoint",
    ]
    assert room.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]["name"] == "rank 0: f"
    room.ask("next", threadId=thread)  # and takes long
    room.tell(Reminded())
    # Others are shown again, although their frames were taken away with the threads that have gone on.
    assert room.stopped_events()[-1]["description"] == "rank 2"
    room.stop(0, 4)
    reply = room.ask("continue", threadId=LOCAL_THREAD)  # JupyterLab has forgotten which thread it meant
    assert reply["body"] == {"allThreadsContinued": True}
    assert room.mux.stopped == ()
    assert "continue" not in room.commands(1)
    assert room.commands(1).count("next") == 2


def test_one_rank_can_go_on_alone() -> None:
    room = Room().start(0, 1)
    room.stop(0)
    room.stop(1)
    thread = room.stopped_events()[1]["threadId"]
    reply = room.ask("continue", threadId=thread, singleThread=True)
    assert reply["body"] == {"allThreadsContinued": False}
    assert room.mux.stopped == (0,)


def test_a_button_that_is_pressed_too_late_does_not_wait_for_the_kernel_to_stop() -> None:
    room = Room().start(0)
    room.local.clear()
    for command in ("continue", "next", "stepIn", "stepOut", "stackTrace"):
        assert room.ask(command, threadId=LOCAL_THREAD)["success"]
    assert not room.local
    key = next(room.keys)
    request = {"type": "request", "seq": key, "command": "next", "arguments": {"threadId": LOCAL_THREAD}}
    room.tell(Requested(key, request, local_stopped=True))
    assert room.local == [request]


def test_whom_the_buttons_move_can_be_chosen() -> None:
    room = Room().start(0, 1)
    room.stop(0)
    room.stop(1)
    frame = room.ask("stackTrace", threadId=room.stopped_events()[0]["threadId"])["body"]["stackFrames"][2][
        "id"
    ]
    room.ask("scopes", frameId=frame)
    said = room.ask("evaluate", expression="%one", frameId=frame)["body"]["result"]
    assert said == "the buttons move only the rank whose frame is selected"
    room.ask("continue", threadId=LOCAL_THREAD)
    assert room.mux.stopped == (0,)
    room.stop(1)
    frame = room.ask("stackTrace", threadId=LOCAL_THREAD)["body"]["stackFrames"][0]["id"]
    room.ask("evaluate", expression="%all", frameId=frame)
    room.ask("continue", threadId=LOCAL_THREAD)
    assert room.mux.stopped == ()
    assert all("evaluate" not in room.commands(rank) for rank in (0, 1))


def test_our_own_button_asks_and_chooses_whom_the_buttons_move() -> None:
    room = Room().start(0, 1)
    assert room.ask("hvdlab/scope")["body"] == {"alone": False, "rank": None, "stoppedRanks": []}
    room.stop(0)
    room.stop(1)
    chosen = room.ask("hvdlab/scope", alone=True)
    assert chosen["success"]
    assert chosen["body"] == {"alone": True, "rank": 0, "stoppedRanks": [0, 1]}
    room.ask("continue", threadId=LOCAL_THREAD)
    assert room.mux.stopped == (1,)
    assert room.ask("hvdlab/scope", alone=False)["body"]["alone"] is False


def test_the_rank_that_is_looked_at_steps_whichever_thread_jupyterlab_names() -> None:
    room = Room().start(0, 1)
    room.stop(0)
    room.stop(1)
    threads = [one["threadId"] for one in room.stopped_events()]
    frames = room.ask("stackTrace", threadId=threads[0])["body"]["stackFrames"]
    room.ask("scopes", frameId=frames[2]["id"])
    assert room.ask("hvdlab/scope", alone=True)["body"]["rank"] == 1
    room.ask("next", threadId=threads[0])
    assert room.mux.stopped == (0,)


def test_who_has_asked_whom_the_buttons_move_is_told_of_each_change() -> None:
    room = Room().start(0, 1)

    def told() -> list[Json]:
        found = [one["body"] for one in room.events if one["event"] == "hvdlab/scope"]
        room.events = []
        return found

    def state(alone: bool, rank: int | None, *stopped: int) -> Json:
        return {"alone": alone, "rank": rank, "stoppedRanks": list(stopped)}

    room.stop(0)
    assert told() == []  # other frontends never hear of it
    room.ask("hvdlab/scope")
    room.stop(1)
    assert told() == [state(False, 0, 0, 1)]
    frames = room.ask("stackTrace", threadId=LOCAL_THREAD)["body"]["stackFrames"]
    room.ask("scopes", frameId=frames[2]["id"])
    assert told() == [state(False, 1, 0, 1)]
    room.ask("evaluate", expression="%one", frameId=frames[2]["id"])
    assert told() == [state(True, 1, 0, 1)]

    room.ask("next", threadId=LOCAL_THREAD)
    assert room.mux.stopped == (0,)
    assert told() == []  # it is about to stop again
    room.stop(1, line=3)
    assert told() == []
    room.ask("next", threadId=LOCAL_THREAD)
    room.tell(Reminded())  # it takes long
    assert told() == [state(True, 0, 0)]
    room.ask("disconnect")
    assert told() == [state(False, None)]


def test_a_rank_that_can_not_take_part_is_named_with_the_reason() -> None:
    room = Room().start(0)

    def refuse(reason: str) -> None:
        room.tell(SetDebuggedRanks((0, 1)))
        room.tell(RankGone(1, reason, refused=True))

    def told() -> list[str]:
        return [one["body"]["output"] for one in room.events if one["event"] == "output"]

    room.taken = {1}
    refuse("debugpy can't be started: AttributeError: _main_lock")
    refuse("debugpy can't be started: AttributeError: _main_lock")  # as with each cell
    why = "rank 1 does not stop at breakpoints: debugpy can't be started: AttributeError: _main_lock\n"
    assert told() == [why]
    assert list(room.mux.left_out) == [1]
    room.taken = set()
    room.tell(SetDebuggedRanks((0, 1)))  # it can after all
    assert room.mux.left_out == {}
    room.tell(RankGone(1, "it has ended"))
    assert told() == [why]


def test_a_rank_that_dies_while_stopped_is_taken_off_the_list() -> None:
    room = Room().start(0, 1)
    room.stop(1)
    thread = room.stopped_events()[0]["threadId"]
    frame = room.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]["id"]
    room.tell(RankGone(1, "killed by SIGKILL"))
    assert [one["body"]["threadId"] for one in room.events if one["event"] == "continued"] == [thread]
    reply = room.ask("scopes", frameId=frame)
    assert not reply["success"]
    assert reply["body"] == {"scopes": []}
    room.tell(SetDebuggedRanks((0, 1)))  # it is replaced
    room.stop(1)
    assert room.stopped_events()[-1]["threadId"] != thread


def test_a_silent_rank_holds_nobody_up_for_ever() -> None:
    room = Room().start(0, 1)
    room.stop(0)
    room.stop(1)
    room.silent.add(1)
    thread = room.stopped_events()[0]["threadId"]
    frames = room.ask("stackTrace", threadId=thread)["body"]["stackFrames"]
    assert [one["name"] for one in frames] == ["rank 0: f", "rank 0: <module>"]


def test_switching_off_lets_all_go_on_and_ends_no_process() -> None:
    room = Room().start(0, 1)
    room.stop(0)
    room.ask("disconnect", terminateDebuggee=False)
    assert not room.opened
    assert room.mux.stopped == ()
    assert not room.mux.on


def test_pause_stops_the_ranks_and_not_the_kernel_that_waits_for_them() -> None:
    room = Room().start(0, 1)
    room.local.clear()
    assert room.ask("pause", threadId=LOCAL_THREAD)["success"]
    assert [room.asked[rank][-1] for rank in (0, 1)] == [
        {**room.asked[rank][-1], "command": "pause", "arguments": {"threadId": 3}} for rank in (0, 1)
    ]
    assert not room.local


def test_variables_with_odd_names_can_not_be_made_code() -> None:
    room = Room().start(0)
    room.stop(0)
    frame = room.ask("stackTrace", threadId=room.stopped_events()[0]["threadId"])["body"]["stackFrames"][0][
        "id"
    ]
    before = len(room.asked[0])
    assert (
        room.ask("richInspectVariables", variableName="os.system('x')", frameId=frame)["body"]["data"] == {}
    )
    assert not room.ask("copyToGlobals", srcVariableName="x", dstVariableName="y']; z", srcFrameId=frame)[
        "success"
    ]
    assert len(room.asked[0]) == before


class AnyOrder(RuleBasedStateMachine):
    """Machine in which ranks come, stop, continue and die in any order, and the frontend sends any request."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room()
        self.seen: list[int] = [LOCAL_THREAD, FIRST + 99]
        self.frames: list[int] = [1, FIRST + 5]
        self.living: set[int] = set()

    @rule(ranks=st.sets(st.integers(0, 3)))
    def come(self, ranks: set[int]) -> None:
        self.living |= ranks
        self.room.ranks = tuple(self.living)
        self.room.tell(SetDebuggedRanks(tuple(ranks)))

    @rule()
    def switch_on(self) -> None:
        self.room.start(*self.living)

    @rule()
    def switch_off(self) -> None:
        assert self.room.ask("disconnect")["success"]
        assert not self.room.opened

    @precondition(lambda self: self.living)
    @rule(data=st.data(), line=st.integers(1, 2))
    def stop(self, data: st.DataObject, line: int) -> None:
        rank = data.draw(st.sampled_from(sorted(self.living)))
        if rank in self.room.opened and rank not in self.room.silent:
            self.room.stop(rank, line)
            self.seen.append(self.room.stopped_events()[-1]["threadId"])

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.living)))
        self.living.discard(rank)
        self.room.opened.discard(rank)
        self.room.at.pop(rank, None)
        self.room.tell(RankGone(rank, "it has ended"))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), silent=st.booleans())
    def fall_silent(self, data: st.DataObject, silent: bool) -> None:
        rank = data.draw(st.sampled_from(sorted(self.living)))
        (self.room.silent.add if silent else self.room.silent.discard)(rank)

    @rule(
        data=st.data(),
        command=st.sampled_from(["stackTrace", "continue", "next", "stepOut", "pause", "exceptionInfo"]),
        alone=st.booleans(),
    )
    def about_a_thread(self, data: st.DataObject, command: str, alone: bool) -> None:
        reply = self.room.ask(command, threadId=data.draw(st.sampled_from(self.seen)), singleThread=alone)
        self.frames += [one["id"] for one in reply["body"].get("stackFrames", ())]

    @rule(
        data=st.data(), command=st.sampled_from(["scopes", "variables", "evaluate", "richInspectVariables"])
    )
    def about_a_frame(self, data: st.DataObject, command: str) -> None:
        number = data.draw(st.sampled_from(self.frames))
        if command == "variables":
            scopes = self.room.ask("scopes", frameId=number)["body"].get("scopes") or [
                {"variablesReference": 1}
            ]
            assert "body" in self.room.ask("variables", variablesReference=scopes[0]["variablesReference"])
        else:
            assert "body" in self.room.ask(command, frameId=number, expression="x", variableName="x")

    @rule()
    def be_reminded(self) -> None:
        self.room.tell(Reminded())

    @rule(lines=st.lists(st.integers(1, 9), max_size=3))
    def set_breakpoints(self, lines: list[int]) -> None:
        points = [{"line": line} for line in lines]
        reply = self.room.ask("setBreakpoints", source={"path": CELL}, breakpoints=points)
        assert [one["line"] for one in reply["body"]["breakpoints"]] == lines

    @rule(command=st.sampled_from(["threads", "debugInfo", "nonsense", "source"]))
    def others(self, command: str) -> None:
        assert "body" in self.room.ask(command)

    @invariant()
    def only_the_living_have_stopped(self) -> None:
        assert set(self.room.mux.stopped) <= self.room.opened
        assert self.room.opened <= self.living

    @invariant()
    def no_number_means_two_things(self) -> None:
        told = self.room.ask("debugInfo")["body"]["stoppedThreads"]
        assert len(set(told)) == len(told)
        assert all(number >= FIRST for number in told)


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase
