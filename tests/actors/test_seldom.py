from actors.log_throttle import Seldom


def test_what_recurs_is_told_at_once_and_then_seldom_with_how_often_it_was():
    seldom = Seldom(10.0)
    assert [seldom.due(now_s) for now_s in (5.0, 5.0, 14.9, 15.0, 15.1, 99.0)] == [1, 0, 0, 3, 0, 2]
