"""Messages of the control plane, as msgspec structs encoded to MessagePack arrays.

Three directions: rank to coordinator (:data:`FromRank`), client to coordinator (:data:`FromClient`) and coordinator
to either (:data:`ToPeer`). A connection begins with :class:`Hello`. ``generation`` is that of the process set at the time
of sending; the receiver drops messages of an older one that have lost their meaning.

Fields are only ever appended: structs are arrays on the wire, and a missing trailing field gets its default.
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 5
"""Version that must be the same on both sides of a connection; raised with each incompatible change of a message."""

MOST_RANKS = (1 << 16) - 1
"""A job has this many ranks at most, with numbers below this: recordings, and the views of them, keep the rank of each span, and the
number of ranks of its process set, in 16 bits."""


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base class of the messages. Their tag on the wire is the name of the class."""

    # gc=False: a message refers to values only and never to itself, so the collector would search thousands of them in vain.


class Record(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base class of the parts of messages."""


# -- parts ------------------------------------------------------------------------------------------------------------


class Signature(Record, frozen=True):
    """Properties that all ranks must ask for under one name.

    For allgather and alltoall ``shape`` leaves out the first dimension, which can differ between ranks and travels
    with each announcement.

    Messages with the same ``channel`` and receiver are those that a receive from any rank on this channel can get. Such a receive has its
    own rank alone as ``ranks``.
    """

    kind: int
    name: str
    dtype: int
    op: int
    shape: tuple[int, ...]
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    group: str = ""
    group_size: int = 0
    ranks: tuple[int, ...] = ()
    channel: str = ""


class Definition(Record, frozen=True):
    """Definition of a local id: ``local`` stands for this signature and call site from now on, on the connection that sends it.

    An allreduce can have a ``priority``: of those that have one the highest goes first. Ranks need not agree on it.
    """

    local: int
    signature: Signature
    site: str
    priority: int | None = None


class Member(Record, frozen=True):
    """Living rank. Of the ``planes`` that it offers those for devices are called ``device/plane``, as ``cuda/nccl``."""

    rank: int
    host: str
    pid: int
    address: str = "127.0.0.1"
    planes: tuple[str, ...] = ()
    plane: str = "auto"
    started: float = 0.0


class Death(Record, frozen=True):
    """Death of a rank. ``when`` is the coordinator's wall clock in seconds since 1970.

    With ``admitted`` the rank had been in a world: others do not wait for it to come.
    """

    rank: int
    pid: int
    when: float
    reason: str
    admitted: bool = False


class KnownSet(Record, frozen=True):
    """Process set as a rank knew it when the coordinator was lost; ``ranks`` were its members in ``generation``.

    ``pids`` are the members' processes, and are given for the world only: under the number of a dead member another process can come,
    which was in no world yet.
    """

    id: int
    generation: int
    ranks: tuple[int, ...]
    pids: tuple[int, ...] = ()


class Decision(Record, frozen=True):
    """Entry of the coordinator's decision log: a decision, or an event that led to one.

    ``number`` grows from one entry to the next, and ``cause`` is the number of the entry that led to this one, or 0. ``when`` is the
    coordinator's wall clock in seconds since 1970. ``kind`` is a
    :class:`~hvdlab.collectives.coordinator.decision_log.DecisionKind`. The subject is a process set (-1 for none) in one ``generation``,
    tensor ``names`` or ``ranks``. ``facts`` are its other fields, as texts.
    """

    number: int
    when: float
    kind: str
    cause: int = 0
    process_set: int = -1
    generation: int = 0
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    # Not shared: msgspec makes a new dict for each object that gets this default.
    facts: dict[str, str] = {}


# -- both ways --------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a peer; ``role`` is ``rank``, ``client`` or ``observer``.

    An observer learns which ranks live and which have died, and may send no requests. A rank's token admits it, and
    the coordinator does not stay for it.

    ``incarnation`` is that of the coordinator that the peer has lost, or -1. A peer that comes back sends the facts for a
    successor in its next message (:class:`Resume`, :class:`Recall`).

    ``versions`` are those that all ranks must have alike, by name.

    ``returns``: if the others have continued without this rank, it enters as a newcomer, with the memory that it has (:class:`Outdated`).
    """

    version: int
    token: str
    role: str
    rank: int = -1
    host: str = ""
    pid: int = 0
    address: str = "127.0.0.1"
    planes: tuple[str, ...] = ()
    plane: str = "auto"
    cells_tracked: bool = False
    events: bool = False
    incarnation: int = -1
    versions: dict[str, str] = {}
    returns: bool = False


class Ping(Message, frozen=True):
    """Liveness probe; answered by :class:`Pong` with the same number.

    Everything but events can overtake events that wait to be sent; so can the answer, unless ``after_events`` is set.
    """

    number: int
    after_events: bool = False


class Pong(Message, frozen=True):
    """Answer to :class:`Ping`. ``clock`` is the answering side's ``time.monotonic_ns()``."""

    number: int
    clock: int = 0
    after_events: bool = False


class Bye(Message, frozen=True):
    """Orderly end of a connection; only end of file follows on it."""

    reason: str = ""


class Post(Message, frozen=True):
    """Mail for the coordinator to relay. From a rank, ``to`` empty means every client; from a client, ``to`` lists ranks."""

    topic: str
    body: bytes
    to: tuple[int, ...] = ()


class Mail(Message, frozen=True):
    """Relayed mail; ``sender`` is a rank, or -1 for a client."""

    topic: str
    sender: int
    body: bytes


# -- rank to coordinator ----------------------------------------------------------------------------------------------


class Resume(Message, frozen=True):
    """First message of a rank to the successor of a coordinator that died.

    ``sets`` are the world (0, if it was formed) and the process sets that were added, ``alive`` the ranks that lived as far
    as this rank knows. ``last_set`` is the highest id of a set that it has seen. ``adding`` and ``removing`` are additions (their
    ranks) and removals (their ids) of process sets that failed here with the loss: the successor has all ranks undo or do them.
    ``cells`` run here; ``ended`` are the last cells that ended, each with the line of its failure. With ``released`` this
    rank is to be released where elastic training lets the world change: perhaps no client is left to report that.
    """

    sets: tuple[KnownSet, ...] = ()
    alive: tuple[int, ...] = ()
    last_set: int = 0
    adding: tuple[tuple[int, ...], ...] = ()
    removing: tuple[int, ...] = ()
    cells: tuple[str, ...] = ()
    ended: tuple[tuple[str, str], ...] = ()
    elastic: bool = False
    released: bool = False


class Announce(Message, frozen=True):
    """Announcement that this rank is ready for the collectives ``locals``, in this order.

    ``extra[i]`` (when not empty, as long as ``locals``) holds the numbers that differ between ranks: the first
    dimension for allgather, the splits for alltoall.

    ``payload`` (not empty only for a single collective) is the tensor itself if it is small: when every member sends
    its own, they travel with the negotiation and no data plane is needed.
    """

    process_set: int
    generation: int
    locals: tuple[int, ...]
    definitions: tuple[Definition, ...] = ()
    extra: tuple[tuple[int, ...], ...] = ()
    payload: bytes = b""


class Duplicate(Message, frozen=True):
    """Report that this rank submitted a name that is in flight here; the pending collective of that name fails on all ranks."""

    process_set: int
    generation: int
    name: str
    first_site: str
    second_site: str


class Blocked(Message, frozen=True):
    """Report that the user's thread has been waiting for ``local`` for ``seconds``; sent once per wait, ``local`` -1 when over.

    ``executing``: the coordinator has ordered it, and it is being executed; sent again when that changes, and for a long execution
    also without a user's thread that waits.
    """

    process_set: int
    generation: int
    local: int
    seconds: float
    executing: bool = False


class Paused(Message, frozen=True):
    """Report that the user looks around here (at a prompt, in a debugger): no rank that waits for this one waits in vain."""

    reason: str


class Resumed(Message, frozen=True):
    """Report that the user does not look around here any more."""


class Withdraw(Message, frozen=True):
    """Request to end the generation with this cause: this rank gives up waiting (interrupt, timeout)."""

    process_set: int
    generation: int
    kind: str
    text: str
    site: str = ""


class Cancel(Message, frozen=True):
    """Request to end a message that waits for the other rank; ``later`` younger ones of the same ``local`` wait behind it.

    Answered by :class:`Cancelled` with the same ``ticket``. If the coordinator has ordered the message meanwhile, the generation ends, as
    by :class:`Withdraw`.
    """

    process_set: int
    generation: int
    local: int
    later: int
    ticket: int
    kind: str
    text: str
    site: str = ""


class DeclinePost(Message, frozen=True):
    """Request to decline: a rank has posted its ``number``-th request on the board of this generation, and members with fewer posts decline.

    To the coordinator, and from it to the members. When a member has left, or the generation has ended in order, the coordinator adds the
    members' processes that are still alive (``pids``): the others will post no more than is on the board.
    """

    process_set: int
    generation: int
    number: int
    pids: tuple[int, ...] = ()


class BoardMissing(Message, frozen=True):
    """Report that this rank has no board of this generation, or none any more, and will post no more than it has."""

    process_set: int
    generation: int


class PlaneFailed(Message, frozen=True):
    """Report that the data plane failed on this rank."""

    process_set: int
    generation: int
    text: str


class Executed(Message, frozen=True):
    """Report that the ``batch``-th batch of order ``sequence`` has been executed here; sent for a batch that is ``reported``."""

    process_set: int
    generation: int
    sequence: int
    batch: int


class Renew(Message, frozen=True):
    """Request for the next generation: the memory of this one did not reach this rank, which could receive it now."""

    process_set: int
    generation: int


class CellBegin(Message, frozen=True):
    """Report that a cell began to run here."""

    cell: str


class CellEnd(Message, frozen=True):
    """Report that a cell ended here; ``error`` is empty, or the line of its failure."""

    cell: str
    error: str = ""


class Elastic(Message, frozen=True):
    """Report that elastic training begins here, or ends: meanwhile newcomers wait until its ranks regroup."""

    on: bool


class Regroup(Message, frozen=True):
    """Request for a new world: this rank is where elastic training lets it change, and submits nothing more before the answer.

    ``at_least`` is how many ranks it needs. The coordinator waits until every rank in training has sent this, and there are enough.
    Then the world gets a new generation with the ranks that wait to enter, and each gets :class:`Regrouped` with its ``ticket``.
    """

    ticket: int
    at_least: int
    reason: str


class StoreSet(Message, frozen=True):
    """Rendezvous value of a process set and generation, for the coordinator to keep."""

    process_set: int
    generation: int
    key: str
    value: bytes


class StoreGet(Message, frozen=True):
    """Request for a rendezvous value; answered by :class:`StoreValue` once it exists."""

    process_set: int
    generation: int
    key: str
    ticket: int


COLLECT, COLLECTED = "hvdlab.events.collect", "hvdlab.events.collected"
"""Topics of mail. A client or rank asks ranks to send their recorded :class:`Events`; each rank then answers with the same body, after
the events and on the same connection."""


class Events(Message, frozen=True):
    """Batch of the recorder, opaque to the coordinator."""

    batch: bytes


class Subscribe(Message, frozen=True):
    """Subscription to every rank's :class:`Events`, with ``history`` those of the past first; or, without ``events``, its end.

    Past batches up to the number ``after`` are left out: they came over an earlier connection.
    """

    events: bool
    history: bool = True
    after: int = 0


# -- client to coordinator --------------------------------------------------------------------------------------------


class Recall(Message, frozen=True):
    """First message of a client that has lost its coordinator, to the successor or to the same one.

    ``members`` lived and ``deaths`` had happened as far as the client knows; ``cells`` run, each on these ranks. ``released``
    are ranks to be let go where elastic training lets the world change, as by :class:`Release`.
    """

    expected: tuple[int, ...]
    members: tuple[Member, ...] = ()
    deaths: tuple[Death, ...] = ()
    cells: tuple[tuple[str, tuple[int, ...]], ...] = ()
    released: tuple[int, ...] = ()


class Expect(Message, frozen=True):
    """Order of a client that these ranks make up the world from now on; living ranks that are not among them have to leave."""

    ranks: tuple[int, ...]


class Release(Message, frozen=True):
    """Order of a client to release these ranks where elastic training lets the world change; at once if no rank trains."""

    ranks: tuple[int, ...]


class CellStarted(Message, frozen=True):
    """Report that a cell is about to be sent to these ranks."""

    cell: str
    ranks: tuple[int, ...]


class InterruptRanks(Message, frozen=True):
    """Order of a client to deliver an interrupt to these ranks' control threads."""

    ranks: tuple[int, ...]


class RankLost(Message, frozen=True):
    """Report of the launcher that a rank's process ended, and how."""

    rank: int
    pid: int
    reason: str


class StoryRequest(Message, frozen=True):
    """Request for the newest ``last`` entries of the decision log, with their causes; answered by :class:`Story` with this ``ticket``.

    The entries are about this ``rank``, this tensor ``name`` or this ``process_set``, and have this number (``decision``), as far as
    these are given.
    """

    ticket: int
    last: int
    rank: int = -1
    name: str = ""
    process_set: int = -1
    decision: int = 0


# -- coordinator to rank or client ------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answer to an accepted Hello. ``pid`` is the coordinator's, or 0."""

    rank: int
    clock: int
    incarnation: int = 0
    pid: int = 0


class Refused(Message, frozen=True):
    """Answer to a refused Hello; the connection is closed after it. ``again``: the coordinator can accept the same Hello in a moment."""

    reason: str
    again: bool = False


class Configure(Message, frozen=True):
    """New generation of a process set, with these members, by position.

    ``plane`` is for tensors of the host; ``device_planes`` has the name of another plane for each device class for which all
    members offer one. With plane ``shm`` one file descriptor (a memfd) comes along with the bytes of this frame.

    ``listed`` is used on the way to ranks (see :mod:`~hvdlab.collectives.protocol.member_lists`): it has the members' ranks, and ``members``
    then describes only those that were not described on this connection before.

    ``decision`` is here, as in all messages of the coordinator, the number of its entry in the decision log.
    """

    process_set: int
    generation: int
    members: tuple[Member, ...]
    plane: str
    options: dict[str, str]
    has_memory: bool = False
    device_planes: dict[str, str] = {}
    listed: tuple[int, ...] = ()
    decision: int = 0


class Dissolve(Message, frozen=True):
    """End of a process set."""

    process_set: int


class Batch(Record, frozen=True):
    """Collectives to execute as one operation of the plane (fused when several).

    ``tables[i]`` (when not empty, as long as ``locals``) has each member's ``extra`` numbers, by position.
    ``payloads`` (when not empty) has each member's tensor, by position: members reduce these instead of using the plane.

    A rank that has joined contributes zeros to collectives that it did not submit: ``locals`` has -1, -2, … there, for the
    first, second, … of ``zeros``.

    ``reported``: the member at position 0 reports that it has executed this (:class:`Executed`).
    """

    locals: tuple[int, ...]
    tables: tuple[tuple[tuple[int, ...], ...], ...] = ()
    payloads: tuple[bytes, ...] = ()
    zeros: tuple[Signature, ...] = ()
    reported: bool = False


class Execute(Message, frozen=True):
    """Order to execute these batches in turn. ``decision`` began this generation: the log counts its orders there, without an entry for each."""

    process_set: int
    generation: int
    sequence: int
    batches: tuple[Batch, ...]
    decision: int = 0


class Tune(Message, frozen=True):
    """Order to move ``slice_bytes`` bytes at a time from the next order of this generation on; 0 leaves the size to the plane."""

    process_set: int
    generation: int
    slice_bytes: int


class Party(Record, frozen=True):
    """Ranks that asked for the same thing, in words."""

    ranks: tuple[int, ...]
    request: str
    site: str


class Reject(Message, frozen=True):
    """Failure, by a mismatch, of the oldest undecided submission of each of ``locals`` (this rank's ids); the generation continues."""

    process_set: int
    generation: int
    locals: tuple[int, ...]
    name: str
    parties: tuple[Party, ...]
    decision: int = 0


class RejectDuplicate(Message, frozen=True):
    """Failure of the oldest undecided submission of each of ``locals`` (this rank's ids): ``rank`` has submitted the name twice."""

    process_set: int
    generation: int
    locals: tuple[int, ...]
    name: str
    rank: int
    first_site: str
    second_site: str
    decision: int = 0


class Decline(Message, frozen=True):
    """Failure of the oldest undecided submission of each of ``locals`` (this rank's ids), although all agree.

    ``reason`` is one sentence. ``joined`` are the ranks that have joined, if that is why it can't be done; empty if it can't
    be done at all.
    """

    process_set: int
    generation: int
    locals: tuple[int, ...]
    name: str
    reason: str
    joined: tuple[int, ...] = ()
    decision: int = 0


class AbortedCollective(Record, frozen=True):
    """Pending collective: the ranks that ``waited`` in it (with their ``sites``), those ``missing``, and those that had ``joined``.

    ``repeats`` is used on the way to ranks (see :mod:`~hvdlab.collectives.protocol.member_lists`): how often each of the ``sites`` comes in
    a row.
    """

    kind: int
    name: str
    waited: tuple[int, ...]
    missing: tuple[int, ...]
    sites: tuple[str, ...] = ()
    joined: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()


class Cancelled(Message, frozen=True):
    """End of a message of one rank to another, while the generation continues: the other rank won't come, or this one asked for it.

    It is the oldest that waits of each of ``locals`` (this rank's ids), or the one that this rank gave up by :class:`Cancel` with
    ``ticket``. The coordinator also answers so any collective of a rank that has the order to leave, while the others continue.
    """

    process_set: int
    generation: int
    locals: tuple[int, ...]
    kind: str
    ranks: tuple[int, ...]
    text: str
    site: str
    pending: AbortedCollective
    ticket: int = -1
    decision: int = 0


class Abort(Message, frozen=True):
    """End of ``generation`` of a process set, and of all before it; the collectives pending in them fail with this cause."""

    process_set: int
    generation: int
    kind: str
    ranks: tuple[int, ...]
    text: str
    site: str
    pending: tuple[AbortedCollective, ...] = ()
    decision: int = 0


class ProcessSetAdded(Message, frozen=True):
    """Result of the negotiated ADD_PROCESS_SET ``local``: the id of the new set. Members get :class:`Configure` before it."""

    local: int
    process_set: int
    ranks: tuple[int, ...]


class StoreValue(Message, frozen=True):
    """Answer to :class:`StoreGet`."""

    ticket: int
    value: bytes


class Interrupt(Message, frozen=True):
    """Order to interrupt the user's code."""


class Leave(Message, frozen=True):
    """Order to leave the world and end."""

    reason: str
    decision: int = 0


class Outdated(Message, frozen=True):
    """Message to a rank that comes back: the others have continued without it, and it enters as a newcomer.

    Its pending collectives belong to a world that is gone, and its user must learn that before the rank submits more.
    """

    text: str


class Returned(Message, frozen=True):
    """Report to clients that a rank has connected again after its connection was lost. It is the same process, with its memory.

    ``seconds`` is the time since its last sign of life before that.
    """

    rank: int
    pid: int
    seconds: float


class World(Message, frozen=True):
    """Membership as it is now; sent to clients and observers on each change, and to ranks soon after it."""

    expected: tuple[int, ...]
    members: tuple[Member, ...]
    deaths: tuple[Death, ...]
    generation: int
    waiting: tuple[int, ...] = ()
    """Ranks that live and wait until elastic training lets them into the world."""
    restoring: bool = False
    """Whether the coordinator still waits for ranks of one that died: a rank that has not come yet is not known to be dead."""
    leaving: tuple[int, ...] = ()
    """Ranks in the world that leave where elastic training lets it change."""
    formed: tuple[int, ...] = ()
    """Ranks that this generation of the world is made of; empty until it has begun."""
    listed: tuple[int, ...] = ()
    """As ``listed`` of :class:`Configure`."""
    training: bool = False
    """Whether ranks are in elastic training: a rank then does not wait for the world to be complete; others are let in later."""
    kept: tuple[int, ...] = ()
    """Ranks in the world that were released and stay for the time being, since too few would be left to train."""


class Regrouped(Message, frozen=True):
    """Report that the generation that :class:`Regroup` asked for has begun."""

    ticket: int


class RankEvents(Message, frozen=True):
    """Events of one rank, to a subscriber. Each coordinator numbers the batches of all ranks from 1 on."""

    rank: int
    batch: bytes
    number: int = 0


class Stalled(Message, frozen=True):
    """Report that a collective has been waiting for ``seconds``, with the ranks that have submitted it, and those that have not."""

    process_set: int
    seconds: float
    collective: AbortedCollective
    decision: int = 0


class PausedRanks(Message, frozen=True):
    """Ranks that are paused now, lowest first, each with its reason; sent to clients on each change."""

    ranks: tuple[int, ...]
    reasons: tuple[str, ...]


class Story(Message, frozen=True):
    """Answer to :class:`StoryRequest`, oldest entry first. ``dropped`` entries have made room for newer ones."""

    ticket: int
    decisions: tuple[Decision, ...]
    dropped: int = 0


FromRank = (
    Hello
    | Resume
    | Ping
    | Pong
    | Bye
    | Post
    | Announce
    | Duplicate
    | Blocked
    | Paused
    | Resumed
    | Withdraw
    | Cancel
    | DeclinePost
    | BoardMissing
    | PlaneFailed
    | Executed
    | Renew
    | CellBegin
    | CellEnd
    | Elastic
    | Regroup
    | StoreSet
    | StoreGet
    | Events
    | Subscribe
)
FromClient = (
    Hello
    | Ping
    | Pong
    | Bye
    | Post
    | Recall
    | Expect
    | Release
    | CellStarted
    | InterruptRanks
    | RankLost
    | Subscribe
    | StoryRequest
)
ToPeer = (
    Welcome
    | Refused
    | Ping
    | Pong
    | Mail
    | Configure
    | Dissolve
    | Execute
    | Tune
    | Reject
    | RejectDuplicate
    | Decline
    | Cancelled
    | Abort
    | DeclinePost
    | ProcessSetAdded
    | StoreValue
    | Interrupt
    | Leave
    | Outdated
    | Returned
    | Regrouped
    | World
    | RankEvents
    | Stalled
    | PausedRanks
    | Story
)
