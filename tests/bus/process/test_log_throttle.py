from bus.process.log_throttle import LogThrottle


def test_what_recurs_is_logged_at_once_and_then_rarely_with_how_often_it_was():
    throttle = LogThrottle(10.0)
    assert [throttle.due(now_s) for now_s in (5.0, 5.0, 14.9, 15.0, 15.1, 99.0)] == [1, 0, 0, 3, 0, 2]
