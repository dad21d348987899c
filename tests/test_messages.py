import messages


def test_the_page_of_messages_is_what_the_source_says() -> None:
    written = messages.PAGE.read_text(encoding="utf-8")
    assert written == messages.render(), "run python tools/messages.py"


def test_every_message_has_a_remedy() -> None:
    without = [m for listed in messages.messages().values() for m, remedy in listed if not remedy]
    assert not without


def test_a_message_is_split_into_problem_and_remedy() -> None:
    given = "heatmaps must be [N,H,W] = [8,64,64], got [8,1,64,64]: drop the channel axis"
    problem, remedy = messages.split(given)
    assert problem == "heatmaps must be [N,H,W] = [8,64,64], got [8,1,64,64]"
    assert remedy == "Drop the channel axis."
    assert messages.split("size must be positive, got 0")[1] == "Give positive."
    assert messages.split("it broke")[1] == ""
