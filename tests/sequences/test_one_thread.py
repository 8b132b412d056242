"""Networks in several threads: the bound on the threads of linear algebra holds as long as one of them needs it."""

from contextlib import ExitStack

from threadpoolctl import threadpool_info, threadpool_limits

from pathspace.sequences.one_thread import one_thread


def threads():
    return {
        library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"
    }


def test_blocks_that_overlap_bound_until_the_last_ends_and_give_back_what_was():
    with threadpool_limits(2):
        first, second = ExitStack(), ExitStack()
        first.enter_context(one_thread())
        second.enter_context(one_thread())
        first.close()
        assert threads() == {1}
        second.close()
        assert threads() == {2}
        with one_thread():
            assert threads() == {1}
        assert threads() == {2}
