"""Prompts whose answers copy from them, and open questions: the prompts that draft tokens are measured with."""

BOATS = """The harbour of Lindesnes was quiet on the morning of the third of May. Twelve fishing boats lay along the
north quay, and the ice machine behind the auction hall hummed as it had done every day since 1974. Marit
Solheim, who had bought the hall two years before, walked along the water with a cup of coffee in her hand and
counted the crates that had come in over night. There were forty-one crates of cod, nine of haddock and one,
at the very end, of something that she had not seen before. She lifted the lid, looked at the fish for a long
time, and then called her brother, who knew the old names."""
BOILER = """Before the boiler is started for the first time, the installer must check that the water pressure lies
between 1.0 and 1.5 bar. The gas valve has to be closed until the flue has been inspected. After the inspection, open
the gas valve slowly and wait for thirty seconds. Press the reset button on the front panel and hold it until
the green light flashes twice. If the light turns red, close the gas valve at once and call the service number
that is printed on the inside of the door. Never remove the cover while the burner is running. The filter
should be cleaned every six months."""
MISSPELT = """Last sumer we visted my grandmother in the mountans. She lives in a smal house with a red roof, and
behind the house
ther is a garden with apple trees, a stone table and an old swing. Every morning she went to the vilage
to buy bred, and we were alowed to go with her. On the way we pased the school, the church and the litle shop
where they sell postcards. In the evening my grandfather told us storys about the war and about the winter of
1956, when the snow was so high that nobody coud leave the house for nine days. I will never forget thos
evenings."""
MEETING = """Minutes of the meeting of the library committee, 14 March. Present: Anna Keller, Tomas Brandt, Yusuf Demir,
Clara Nowak.
1. The reading room will be closed from 2 to 9 April because the floor is being repaired. Anna Keller puts up
a notice.
2. The budget for new books is 4,200 euros, which is 300 euros less than last year. Tomas Brandt writes to the
town council.
3. The story hour for children moves from Tuesday to Thursday at 4 pm, beginning on 3 April. Clara Nowak tells
the parents.
4. Two computers in the study room are broken. Yusuf Demir asks for an offer by the end of the month.
The next meeting is on 11 April at 6 pm in the reading room of the town hall."""
CODE = '''def average(values, weights=None):
    """Return the weighted mean of a list of values."""
    if weights is None:
        weights = [1.0] * len(values)
    if len(values) != len(weights):
        raise ValueError("values and weights must have the same length")
    total = 0.0
    weight_sum = 0.0
    for value, weight in zip(values, weights):
        total += value * weight
        weight_sum += weight
    if weight_sum == 0:
        raise ZeroDivisionError("the weights sum up to zero")
    return total / weight_sum
'''
CONFIG = """{
  "name": "weather-station",
  "interval_seconds": 60,
  "sensors": [
    {"id": "t1", "kind": "temperature", "unit": "celsius", "pin": 4},
    {"id": "h1", "kind": "humidity", "unit": "percent", "pin": 5},
    {"id": "p1", "kind": "pressure", "unit": "hectopascal", "pin": 7}
  ],
  "upload": {"url": "/api/readings", "retries": 3, "timeout_seconds": 10},
  "log_level": "info"
}"""
LETTER = """Dear Mr. Hollis, thank you for your letter of 6 September and for the three photographs of the clock. From
what I can see, it was made in Vienna between 1820 and 1830, probably in the workshop of Anton Brandl, who
signed his movements on the back plate. The case seems to be walnut, and the dial has been painted over at
least once. I would not try to clean it before somebody has looked at the paint. If you can bring the clock to
our shop in Bath, my colleague Edith Marlow will examine it without charge; she is here on Wednesdays and
Fridays from ten to four. With kind regards, Julian Prowse"""

COPYING = (
    f"Correct the spelling mistakes in this text and answer with the corrected text only.\n\n{MISSPELT}",
    f"Repeat this text word for word, but change the name Marit Solheim to Ingrid Dahl.\n\n{BOATS}",
    f"Write this text again, exactly as it is.\n\n{BOILER}",
    f"Here are some minutes. Copy them, and change 4,200 euros to 5,000 euros.\n\n{MEETING}",
    f"Rename the function average to weighted_mean and print the whole code.\n\n```python\n{CODE}```",
    f"Change the interval to 30 seconds and print the whole file.\n\n```json\n{CONFIG}\n```",
    f"Write this letter again with the date 9 October instead of 6 September.\n\n{LETTER}",
    f"Quote the sentences of this text that speak of the gas valve, word for word.\n\n{BOILER}",
    f"Which tasks were given to whom? Quote the four numbered points.\n\n{MEETING}",
    f"Add a comment to the first line of this code and print the whole code.\n\n```python\n{CODE}```",
    f"Copy the following story and give it a title.\n\n{BOATS}",
    f"Correct this letter where it needs it and print all of it.\n\n{LETTER}",
)
OPEN = (
    "Why is the sky blue during the day and red in the evening?",
    "Tell me a short story about a fox who wants to learn to swim.",
    "What should I think about before I adopt a dog?",
    "Explain how a bicycle stays upright.",
    "Write a poem about the first snow of the year.",
    "What are the advantages and disadvantages of living in a big city?",
    "How did people tell the time before there were clocks?",
    "Give me some advice for my first job interview.",
    "Describe a day in the life of a lighthouse keeper.",
    "What is the difference between weather and climate?",
    "How is chocolate made?",
    "Invent a game that can be played with three coins and a cup.",
)
