"""The table of flags, and its products: parser, configuration file, environment, documentation."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # has no types

from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.protocol.messages import MOST_RANKS
from hvdlab.collectives.settings import VARIABLES
from hvdlab.launch.command import exported
from hvdlab.launch.hosts import Host, assign, is_local, parse_hosts, read_hostfile
from hvdlab.runner.cli import parse
from hvdlab.runner.flags import FLAGS, FlagKind, filled
from hvdlab.runner.job_spec import variables
from hvdlab.runner.options import RunOptions, read_config, values

DOCS = Path(__file__).parents[3] / "docs"

HOROVODRUN = """
-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces
--network-interface --output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file
--fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce
--hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
--autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
--autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout
--reset-limit --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles
--no-stall-check --stall-check --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds
--mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity
--gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp -prefix-timestamp
--prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H --hosts -hostfile --hostfile
--host-discovery-script --gloo --mpi --jsrun
"""


def options(
    line: str = "", environ: dict[str, str] | None = None, config: dict[str, Any] | None = None
) -> RunOptions:
    given, _ = parse(shlex.split(line))
    return RunOptions(given, config or {}, environ or {})


def test_every_flag_of_horovodrun_is_there() -> None:
    ours = {name for flag in FLAGS for name in (*flag.names, *flag.off)}
    assert set(HOROVODRUN.split()) <= ours


def test_a_flags_variable_is_known_to_those_who_read_variables() -> None:
    known = {variable.name for variable in VARIABLES}
    launchers = {"HOROVOD_START_TIMEOUT", "HVDLAB_SSH"}
    assert {flag.variable for flag in FLAGS if flag.variable} - known <= launchers


def test_the_command_is_left_alone() -> None:
    given, command = parse(["-np", "2", "python", "train.py", "--verbose", "-np", "3"])
    assert given == {"num_proc": 2}
    assert command == ["python", "train.py", "--verbose", "-np", "3"]
    assert parse(["-np", "2", "--", "./run.sh", "-x"])[1] == ["./run.sh", "-x"]


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(SystemExit):
        parse(["--verb", "python"])


def test_variables_of_flags() -> None:
    line = "--fusion-threshold-mb 32 --no-stall-check --timeline-filename t.json --timeline-mark-cycles --autotune"
    assert options(line + " --no-hierarchical-allreduce --log-level debug").variables() == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
        "HOROVOD_LOG_LEVEL": "DEBUG",
    }


def test_thread_affinity_flag_passes_on_a_core_for_each_local_rank() -> None:
    assert options("--thread-affinity 0,3").variables() == {"HOROVOD_THREAD_AFFINITY": "0,3"}
    config = values({"library-options": {"thread-affinity": 2}}, "file")
    assert RunOptions({}, config, {}).variables() == {"HOROVOD_THREAD_AFFINITY": "2"}


def test_the_command_line_wins_over_the_file_and_that_over_the_environment() -> None:
    environ = {"HOROVOD_START_TIMEOUT": "7", "HOROVOD_CYCLE_TIME": "3"}
    config = {"start_timeout": 8, "num_proc": 5, "cycle_time_ms": 4.0}
    assert options("", environ).get("start_timeout") == 7
    assert options("", environ, config).get("start_timeout") == 8
    assert options("--start-timeout 9", environ, config).get("start_timeout") == 9
    assert options("-np 2", environ, config).job(["x"]).size == 2
    assert options("", environ, config).job(["x"]).environment["HOROVOD_CYCLE_TIME"] == "4.0"
    assert "HOROVOD_CYCLE_TIME" not in options("-np 2", environ).job(["x"]).environment


def test_a_configuration_file_as_of_horovod(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "verbose: true\n"
        "params:\n  fusion_threshold_mb: 32\n  cycle_time_ms: 50\n"
        "autotune:\n  enabled: true\n  log_file: tuned.csv\n  gaussian_process_noise: 0.9\n"
        "timeline:\n  filename: t.json\n  mark_cycles: true\n"
        "stall-check:\n  enabled: false\n"
        "library_options:\n  num_nccl_streams: 2\n"
        "logging:\n  level: info\n  hide-timestamp: true\n"
    )
    found = RunOptions({}, read_config(file), {})
    assert found.get("verbose") is True
    assert found.variables()["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert found.variables()["HOROVOD_LOG_LEVEL"] == "INFO"
    assert found.variables()["HOROVOD_AUTOTUNE_LOG"] == "tuned.csv"
    assert found.warnings() == [
        (
            "--autotune-gaussian-process-noise has no effect here: settings are swept one after the other, "
            "and the best is compared with the first in turns"
        ),
        "--num-nccl-streams has no effect here: NCCL has one stream for each process set",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("params:\n  fusion: 3\n", "there is no params.fusion"),
        ("timeline:\n  file-name: x\n", "timeline.filename?"),
        ("params:\n  fusion-threshold-mb: many\n", "number was expected"),
        ("params: 3\n", "must be a mapping"),
        ("- a\n", "must be a mapping"),
        ("a: [\n", "is no YAML"),
        ("verbose: 3\n", "yes or no was expected"),
    ],
)
def test_what_a_file_gets_wrong_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=said.replace("?", r"\?")):
        read_config(file)


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert read_config(tmp_path / "c.yaml") == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "how many ranks"),
        ("-np 3 -H localhost:2", "needs 3 slots"),
        ("-H a -hostfile b", "give one of them"),
        ("-np 2 --plane wire", "HVDLAB_PLANE='wire'"),
        ("-np 2 --plane nccl", "NCCL moves CUDA tensors only"),
        ("-np 0", "give each host one at least"),
        ("-np 2 --min-np 3", "must be from 1"),
        ("-H a/b:2", "is no host"),
        ("-H a:0", "give each host one at least"),
        ("-hostfile /nowhere/hosts", "can't be read"),
    ],
)
def test_wishes_that_do_not_fit(line: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        options(line).job(["x"])


def test_a_variable_that_holds_nonsense() -> None:
    with pytest.raises(InvalidRequestError, match="HOROVOD_FUSION_THRESHOLD"):
        options("-np 2", {"HOROVOD_FUSION_THRESHOLD": "much"})
    with pytest.raises(InvalidRequestError, match="HOROVOD_START_TIMEOUT"):
        options("-np 2", {"HOROVOD_START_TIMEOUT": "long"}).job(["x"])


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedError):
        options("-np 2 --jsrun").job(["x"])
    for line, text in {
        "-np 2 -H a:2 --host-discovery-script x.sh": "give it without -H",
        "-np 2 --max-np 1 --host-discovery-script x.sh": "--max-np 1 must be",
        "-np 2 --min-np 3 --host-discovery-script x.sh": "--min-np 3 must be",
        "-np 2 --slots-per-host 0 --host-discovery-script x.sh": "at least one slot",
        "-np 65536": "-np 65536: a job has 65535 ranks at most",
        "-np 2 --max-np 65536 --host-discovery-script x.sh": "--max-np 65536: a job has 65535 ranks at most",
        "-np 2 --blacklist-cooldown-range 9 3 --host-discovery-script x.sh": "the smaller one first",
    }.items():
        with pytest.raises(InvalidRequestError, match=text):
            options(line).job(["x"])


def test_hosts_that_come_and_go() -> None:
    job = options("-np 2 --host-discovery-script 'echo a' --slots-per-host 3").job(["x"])
    assert job.source is not None
    assert job.source.find() == {"a": 3}
    assert (job.min_ranks, job.launcher, job.hosts, job.slots) == (1, "ssh", (), ())
    growth = job.policy().growth
    assert growth is not None
    assert (growth.start, growth.most, growth.wait) == (2, MOST_RANKS, 600)
    line = "-np 2 --min-np 2 --max-np 4 -H a:2,b:2 --blacklist-cooldown-range 5 60 --elastic-timeout 7"
    job = options(line).job(["x"])
    assert job.source is not None
    assert job.source.find() == {"a": 2, "b": 2}
    assert (job.cooldown, job.max_ranks, job.elastic_timeout) == ((5, 60), 4, 7)
    assert options("-np 2 --min-np 2 --max-np 2 -H a:2,b:2").job(["x"]).source is None


def test_elastic() -> None:
    job = options("--min-np 2 -np 4 --reset-limit 0 --elastic-timeout 20").job(["x"])
    assert (job.size, job.min_ranks, job.reset_limit) == (4, 2, 0)
    assert job.environment["HOROVOD_ELASTIC_TIMEOUT"] == "20"


def test_ssh() -> None:
    found = options("-np 1 -p 2222 -i key").ssh()
    assert found[:1] == ("ssh",)
    assert found[-4:] == ("-p", "2222", "-i", "key")
    assert options("", {"HVDLAB_SSH": "ip netns exec"}).ssh() == ("ip", "netns", "exec")


def test_hosts() -> None:
    assert parse_hosts("a:2,b, a:1") == [Host("a", 3), Host("b", 1)]
    assert parse_hosts("10.0.0.1:4") == [Host("10.0.0.1", 4)]
    slots = assign([Host("a", 2), Host("b", 2)], 3)
    assert [(slot.rank, slot.host, slot.where.local_rank, slot.where.cross_rank) for slot in slots] == [
        (0, 0, 0, 0),
        (1, 0, 1, 0),
        (2, 1, 0, 1),
    ]
    assert is_local("localhost")
    assert is_local("127.0.0.1")
    assert not is_local("some-other-host")


@pytest.mark.parametrize(
    "slots", ["a slots=2\nb slots=4\n", "# x\na slots=2 max_slots=2\n\nb cpus = 4 # y\n", "a:2\nb:4"]
)
def test_host_files(slots: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(slots)
    assert read_hostfile(tmp_path / "hosts") == [Host("a", 2), Host("b", 4)]


def test_what_goes_along_to_other_hosts() -> None:
    environ = {
        "DATA": "/data",
        "PATH": "/bin",
        "SSH_AUTH_SOCK": "/x",
        "HOME": "/root",
        "BASH_FUNC_f%%": "() {}",
    }
    assert exported(environ) == {"DATA": "/data", "PATH": "/bin"}


def test_the_reference_shows_this_table() -> None:
    page = (DOCS / "reference/command-line.md").read_text()
    assert page == filled(page), "run: python -m hvdlab.runner.flags docs/reference/command-line.md"


def test_the_table_is_consistent() -> None:
    keys = [flag.config for flag in FLAGS if flag.config]
    assert len(set(keys)) == len(keys)
    for flag in FLAGS:
        assert flag.meaning
        assert not flag.off or flag.kind is FlagKind.SWITCH
        assert not flag.inverted or flag.variable


def test_the_example_in_the_reference_can_be_read() -> None:
    page = (DOCS / "reference/command-line.md").read_text()
    example = page.partition("```yaml\n")[2].partition("```")[0]
    found = values(yaml.safe_load(example), "the example")
    assert found["num_proc"] == 4
    assert found["stall_check_warning_time_seconds"] == 30


@pytest.mark.parametrize(
    ("line", "environ", "launcher", "ranks"),
    [
        ("-np 2", {}, 60.0, "65"),
        ("-np 2", {"HVDLAB_START_TIMEOUT": "90"}, 90.0, "95"),
        ("-np 2 --start-timeout 20", {"HVDLAB_START_TIMEOUT": "90"}, 20.0, "25"),
        ("-np 2 --gloo-timeout-seconds 7", {}, 7.0, "12"),
        ("-np 2 --min-np 1 --elastic-timeout 100", {}, 60.0, "105"),
        ("-np 2 --min-np 1 --elastic-timeout 100", {"HVDLAB_START_TIMEOUT": "300"}, 300.0, "305"),
    ],
)
def test_ranks_wait_longer_for_each_other_than_the_launcher_does(
    line: str, environ: dict[str, str], launcher: float, ranks: str
) -> None:
    job = options(line, environ).job(["x"])
    assert job.policy().join_timeout == launcher
    assert variables(job)["HVDLAB_START_TIMEOUT"] == ranks
