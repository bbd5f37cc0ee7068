"""Signals that ask to stop wait for the end of the work; a second one does not."""

import signal
import threading

import pytest

from regard.training.stopping import SIGNALS, Stopping, exits_on_signals


@pytest.fixture(autouse=True)
def _usual_handlers():
    """What a process in a terminal has; a test run in the background may have been told to ignore Ctrl-C."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_the_work_goes_on(number):
    before = signal.getsignal(number)
    done = []
    with Stopping() as stopping:
        assert stopping.asked is None
        signal.raise_signal(number)
        done.append(True)
    assert done == [True]
    assert stopping.asked == number
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_acts_at_once():
    done = []

    def work():
        with Stopping():
            signal.raise_signal(signal.SIGINT)
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["first"]


def test_a_run_that_was_stopped_ends_as_its_signal_would_have_ended_it():
    def stopped_by(number):
        with Stopping() as stopping:
            signal.raise_signal(number)
            stopping.end()

    with pytest.raises(KeyboardInterrupt):
        stopped_by(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        stopped_by(signal.SIGTERM)
    assert ended.value.code == 143


def test_handlers_come_back_after_an_error():
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(ZeroDivisionError), Stopping():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_process_that_ignores_a_signal_goes_on_ignoring_it():
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with exits_on_signals(), Stopping() as stopping:
        for number in SIGNALS:
            signal.raise_signal(number)
    assert stopping.asked is None


def test_a_thread_that_no_signal_reaches_has_nothing_to_wait_for():
    done = []

    def work():
        with exits_on_signals(), Stopping() as stopping:
            done.append(stopping.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [None]


def test_sigterm_lets_a_block_clean_up_and_exits_with_143():
    cleaned = []

    def work():
        with exits_on_signals():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                cleaned.append(True)

    with pytest.raises(SystemExit) as ended:
        work()
    assert ended.value.code == 143
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
