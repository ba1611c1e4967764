"""What the clients talk about.

The scripted model knows the questions by heart; the embedded one is made to answer by a grammar.
"""

from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, Field

KEY = "secret"
"""The API key of both servers."""

QUESTION = "Does it rain in Paris?"
TWO_QUESTIONS = "Does it rain in both Paris and Oslo?"
RESULT = "42 mm"
"""What the tool returns; the scripted model's answer depends on it."""

FINAL_RESULT = "43 mm"
"""The same for agents that end by a call of a tool `final_answer`."""

ANSWER = "It rains 42 mm."
THOUGHT = "I need the weather."
"""What the scripted model thinks before it calls the tool."""

TRIP_QUESTION = "Plan a trip to Oslo."
TOO_LONG = "word " * 3000
"""More than the context of the server with the embedded model."""


FATAL = "Fail at <s>."
"""The scripted worker dies of each request with it, until that is failed."""


class Trip(BaseModel):
    """A typed answer. Its fields have bounds, so that any model soon finishes it."""

    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=9)
    note: str = Field(max_length=20)


TRIP = Trip(city="Oslo", days=3, note="Take a coat")
"""The scripted model's typed answer."""


class Weather:
    """The tool: it keeps the cities that it was asked for."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    @property
    def tool(self) -> Callable[[str], str]:
        """Return the tool as frameworks take it: a function with types and a docstring."""

        def get_weather(city: str) -> str:
            """Get the weather in a city.

            Args:
                city: The name of the city.
            """
            self.cities.append(city)
            return RESULT

        return get_weather
