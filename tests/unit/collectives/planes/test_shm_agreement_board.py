"""Posts of members on the board: all read the same, at any time, and nothing is overwritten too early."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hvdlab.collectives.planes.base import PlaneAborted
from hvdlab.collectives.planes.shm.agreement_board import DECLINED, AgreementBoard, map_board
from hvdlab.collectives.planes.shm.layout import PAGE, AgreementBoardLayout
from support.effort import examples
from support.patience import PATIENCE
from support.threads import asleep, in_threads

Boards = list[AgreementBoard]
Post = int | str
"""A digest, or ``leave``: the member goes."""


@pytest.fixture
def make() -> Iterator[Callable[[int], Boards]]:
    made: Boards = []

    def boards(members: int) -> Boards:
        with tempfile.TemporaryFile() as file:
            file.truncate(PAGE + AgreementBoardLayout(members).size)
            new = [map_board(file.fileno(), PAGE, members, index, 1) for index in range(members)]
        found = [board for board in new if board is not None]
        assert len(found) == members
        made.extend(found)
        return found

    yield boards
    for board in made:
        board.close()


def tensor(member: int, number: int, size: int = 64) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(size, (16 * number + member) % 256, np.uint8)


def size_of(digest: int) -> int:
    """Return a size, so that posts of different requests lie in places of different members."""
    return 64 if digest == 7 else 200


def expected(scripts: Sequence[Sequence[Post]], number: int) -> bool:
    posts = [script[number - 1] if len(script) >= number else "leave" for script in scripts]
    return posts[0] not in (DECLINED, "leave") and len(set(posts)) == 1


class Member:
    """Member that follows its script, and checks the agreement whenever it can."""

    def __init__(self, board: AgreementBoard, index: int, scripts: Sequence[Sequence[Post]]) -> None:
        self.board, self._index, self._scripts = board, index, scripts
        self._left = list(scripts[index])
        self._there = True  # has not gone
        self._seen = 0

    def look(self) -> None:
        """Compare the member's current request with the expected result."""
        number = self.board.number
        if self._there and number > 0 and self.board.wait(number, 0):
            agreed = self.board.agreed(number)
            assert agreed == expected(self._scripts, number), (self._scripts, self._index, number)
            if agreed:
                digest = self._scripts[self._index][number - 1]
                assert isinstance(digest, int)
                size = size_of(digest)
                for other, found in enumerate(self.board.tensors(number & 1, size)):
                    wanted = tensor(other, number, size)
                    assert (found == wanted).all(), (self._scripts, self._index, number, other)
            self._seen = number

    def step(self) -> bool:
        """Return the next post, if it may come now."""
        if not self._left or not self.board.vacant:
            return False
        self.look()
        post = self._left.pop(0)
        if post == "leave":
            self._there = False
            self.board.retire()
        elif post == DECLINED:
            self.board.decline()
        else:
            assert isinstance(post, int)
            self.board.post(post, tensor(self._index, self.board.number + 1, size_of(post)))
        return True


def scripts_of(digests: Sequence[int]) -> list[tuple[Post, ...]]:
    every: Iterator[tuple[Post, ...]] = itertools.product([*digests, DECLINED, "leave"], repeat=3)
    return [script for script in every if "leave" not in script[:-1]]


def test_all_members_see_the_same_in_every_order_of_posts(make: Callable[[int], Boards]) -> None:
    """Two members and three requests each, in every combination and in every order."""
    orders = sorted(set(itertools.permutations([0, 0, 0, 1, 1, 1])))
    for pair in itertools.product(scripts_of([7]), scripts_of([7, 9])):
        for order in orders:
            check_order(make, pair, order)


def test_so_do_three_of_them_for_long(make: Callable[[int], Boards]) -> None:
    for seed in range(examples(200)):
        chance = random.Random(seed)
        scripts = [
            [chance.choices([7, 9, DECLINED], [20, 1, 1])[0] for _ in range(20)]
            + ["leave"] * chance.randint(0, 1)
            for _ in range(3)
        ]
        order = [index for index, script in enumerate(scripts) for _ in script]
        chance.shuffle(order)
        check_order(make, scripts, order)


def check_order(
    make: Callable[[int], Boards], scripts: Sequence[Sequence[Post]], order: Sequence[int]
) -> None:
    boards = make(len(scripts))
    members = [Member(board, index, scripts) for index, board in enumerate(boards)]
    for board in boards:
        assert board.vacant
    waiting = list(order)
    while waiting:
        for place, chosen in enumerate(waiting):
            if members[chosen].step():
                del waiting[place]
                break
        else:
            assert any("leave" in script for script in scripts), (
                scripts
            )  # a member that has gone has no more posts
            break
        for member in members:
            member.look()
    for board in boards:
        board.close()


@pytest.mark.parametrize(("members", "rounds"), [(3, 1500), (40, 100)])
def test_threads_meet_wake_each_other_and_agree(
    make: Callable[[int], Boards], members: int, rounds: int
) -> None:
    rounds, seen = examples(rounds), [list[bool]() for _ in range(members)]

    def meet(board: AgreementBoard, index: int) -> None:
        chance = random.Random(index)
        for _ in range(rounds):
            number = board.number + 1
            if chance.random() < 0.06 / members:
                board.decline()
            else:
                board.post(5, tensor(index, number))
            assert board.wait(number, PATIENCE)
            agreed = board.agreed(number)
            seen[index].append(agreed)
            if agreed:
                for other, found in enumerate(board.tensors(number & 1, 64)):
                    assert (found == tensor(other, number)).all()
            if chance.random() < 0.01:
                os.sched_yield()

    in_threads([partial(meet, board, index) for index, board in enumerate(make(members))])
    assert all(one == seen[0] for one in seen)
    assert 0 < sum(seen[0]) < rounds


def test_a_wait_ends_by_an_abort_by_whoever_goes_and_by_whoever_is_gone(
    make: Callable[[int], Boards],
) -> None:
    waits: list[object] = []

    def wait(board: AgreementBoard, ends: Callable[[], None]) -> None:
        number = board.post(5, None)
        main = threading.get_native_id()

        def end_once_asleep() -> None:
            asleep(main)
            ends()

        thread = threading.Thread(target=end_once_asleep)
        thread.start()
        try:
            waits.append((board.wait(number, PATIENCE), board.agreed(number)))
        except PlaneAborted:
            waits.append("aborted")
        thread.join()

    one, _ = make(2)
    wait(one, one.abort)
    one, other = make(2)
    wait(one, other.retire)
    one, other = make(2)
    wait(one, partial(one.mark_departed, [1]))
    assert waits == ["aborted", (True, False), (True, False)]


def test_what_was_posted_before_its_member_was_gone_counts(make: Callable[[int], Boards]) -> None:
    one, other, third = make(3)
    for board in (other, third):
        board.post(5, None)
    for board in (one, third):
        board.mark_departed([1])  # every member that learns of it writes the same
        board.mark_departed([1])
    number = one.post(5, None)
    for board in (one, third):
        assert board.wait(number, 0)
        assert board.agreed(number)
        board.post(5, None)
    for board in (one, third):
        assert board.wait(number + 1, 0)
        assert not board.agreed(number + 1)


def test_a_request_is_complete_soon_once_all_have_posted_or_an_abort_came_after(
    make: Callable[[int], Boards],
) -> None:
    one, other = make(2)
    number = one.post(5, None)
    assert not one.complete_soon(number)
    other.post(5, None)
    assert one.complete_soon(number)
    one.abort()
    assert one.complete_soon(number)
    with pytest.raises(PlaneAborted):
        one.wait(number, None)


def test_a_wait_gives_up_in_time_and_can_be_gone_on_with(make: Callable[[int], Boards]) -> None:
    one, other = make(2)
    number = one.post(5, None)
    assert not one.wait(number, 0.01)
    other.post(5, None)
    assert one.wait(number, None)
    assert one.agreed(number)


def test_a_segment_without_room_has_no_board(tmp_path: Path) -> None:
    file = tmp_path / "segment"
    file.write_bytes(bytes(PAGE + AgreementBoardLayout(2).size))
    descriptor = os.open(file, os.O_RDWR)
    try:
        assert map_board(descriptor, 2 * PAGE, 2, 0, 1) is None
        assert map_board(descriptor, PAGE + 1, 2, 0, 1) is None
    finally:
        os.close(descriptor)
