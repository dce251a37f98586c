"""Which failed attempts are followed by another, and after how long."""

from dataclasses import replace

from pretrain.run.restarts import AttemptRecord, add, faulty_again, read, refusal, seconds_to_wait

FAILED = AttemptRecord(
    attempt=1,
    outcome="failed",
    began=0.0,
    ended=100.0,
    trained_from=10.0,
    step=40,
    rank=1,
    cause="rank 1 ended with exit code 1",
    error="ValueError: 7 at 0x7f01",
    checkpoint=30,
)
KILLED = replace(FAILED, cause="rank 1 was killed by SIGKILL", error="", killed=True)


def later(record: AttemptRecord, **values: object) -> AttemptRecord:
    return replace(record, attempt=record.attempt + 1, ended=record.ended + 60, **values)  # type: ignore[arg-type]


def test_a_failure_is_followed_by_another_attempt_and_a_wrong_run_file_or_a_full_disk_is_not():
    assert refusal([FAILED], 3) is None
    assert refusal([FAILED], 0) == ""
    assert refusal([replace(FAILED, outcome="refused")], 3) == ""
    full = replace(FAILED, error="OSError: [Errno 28] No space left on device: 'runs/a/metrics.jsonl'")
    assert "free some space, then run the same command again" in (refusal([full], 3) or "")


def test_a_step_that_fails_again_without_a_new_checkpoint_between_ends_the_run():
    """Its error is the same but for a number and an address."""
    again = later(FAILED, error="ValueError: 8 at 0x55aa")
    same = f"the same error ({again.error}) and no new checkpoint between"
    assert refusal([FAILED, again], 9) == f"step 40 has failed twice with {same}, so it would fail again"
    assert refusal([FAILED, later(again, checkpoint=39)], 9) is None
    assert refusal([FAILED, later(FAILED, step=41)], 9) is None
    assert refusal([FAILED, later(FAILED, error="KeyError: 'a'")], 9) is None


def test_a_step_that_fails_three_times_ends_the_run_though_it_saved_between():
    records = [FAILED, later(FAILED, checkpoint=38), later(later(FAILED), checkpoint=39)]
    assert refusal(records[:2], 9) is None
    same = "the same error (ValueError: 7 at 0x7f01)"
    assert refusal(records, 9) == f"step 40 has failed 3 times with {same}, so another attempt would fail too"
    killed = [KILLED, later(KILLED), later(later(KILLED))]
    assert refusal(killed[:2], 9) is None  # something outside killed it, which may be chance
    assert "step 40 has failed 3 times" in (refusal(killed, 9) or "")
    starting = [replace(one, step=None, trained_from=None) for one in killed]
    assert refusal(starting, 9) is None


def test_restarts_are_limited_by_the_hour():
    for apart, follows in ((60.0, False), (1900.0, True)):
        records = [replace(KILLED, attempt=number, step=number, ended=number * apart) for number in range(1, 5)]
        assert refusal(records[:3], 3) is None
        assert (refusal(records, 3) is None) is follows


def test_attempts_that_never_train_come_at_growing_intervals():
    idle = replace(FAILED, trained_from=None)
    assert [seconds_to_wait([idle] * number) for number in (1, 2, 3, 7, 20)] == [1, 2, 4, 60, 60]
    assert seconds_to_wait([idle, idle, FAILED]) == 0
    assert seconds_to_wait([FAILED, idle]) == 1


def test_records_are_read_back_without_a_line_that_is_cut(tmp_path):
    add(tmp_path, FAILED)
    add(tmp_path, KILLED)
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"attempt": 3, "outc')
    assert read(tmp_path) == [FAILED, KILLED]


def test_a_node_is_faulty_again_once_a_second_failure_names_it():
    found = replace(FAILED, faulty_node="b")
    assert faulty_again([found]) is None
    assert faulty_again([found, later(KILLED)]) is None
    assert faulty_again([found, later(found, rank=3, faulty_node="a")]) is None
    assert faulty_again([found, later(KILLED), later(found, rank=3)]) == "b"
