"""Words from which the questions, tools and listings are made, and sentences of them."""

from random import Random

PEOPLE = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Ida",
    "Jack",
    "Kate",
    "Leo",
    "Mary",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Victor",
    "Alice",
    "Bruno",
    "Carol",
    "Daniel",
    "Eva",
    "Frank",
    "Hanna",
    "Ivan",
    "Julia",
    "Karl",
    "Laura",
    "Max",
    "Nina",
    "Oscar",
    "Peter",
    "Ruth",
    "Simon",
    "Tom",
    "Vera",
    "Walter",
]
CITIES = [
    "Rome",
    "Paris",
    "London",
    "Berlin",
    "Madrid",
    "Vienna",
    "Oslo",
    "Lisbon",
    "Prague",
    "Dublin",
    "Athens",
    "Warsaw",
    "Zurich",
    "Milan",
    "Tokyo",
    "Cairo",
    "Boston",
    "Chicago",
    "Toronto",
    "Sydney",
    "Delhi",
    "Lima",
    "Seoul",
    "Kyoto",
    "Havana",
    "Geneva",
    "Munich",
    "Porto",
    "Seville",
    "Bern",
]
ANIMALS = [
    "fox",
    "cat",
    "dog",
    "bear",
    "wolf",
    "hare",
    "owl",
    "mouse",
    "horse",
    "cow",
    "duck",
    "goose",
    "frog",
    "lion",
    "crow",
    "deer",
    "goat",
    "hen",
    "pig",
    "bee",
]
THINGS = [
    "lamp",
    "chair",
    "table",
    "book",
    "pen",
    "cup",
    "plate",
    "spoon",
    "clock",
    "box",
    "bag",
    "coat",
    "hat",
    "shoe",
    "ring",
    "ball",
    "kite",
    "drum",
    "bell",
    "key",
    "map",
    "rope",
    "cart",
    "boat",
    "bike",
    "stone",
    "brick",
    "door",
    "mirror",
    "candle",
    "basket",
    "bottle",
    "brush",
    "knife",
    "bowl",
]
FOODS = [
    "apple",
    "pear",
    "plum",
    "cherry",
    "lemon",
    "bread",
    "cheese",
    "egg",
    "cake",
    "soup",
    "rice",
    "nut",
    "carrot",
    "potato",
    "onion",
    "fish",
    "honey",
    "tea",
]
ADJECTIVES = [
    "small",
    "big",
    "old",
    "young",
    "red",
    "blue",
    "green",
    "grey",
    "brown",
    "white",
    "black",
    "quick",
    "slow",
    "warm",
    "cold",
    "happy",
    "sad",
    "quiet",
    "loud",
    "kind",
    "brave",
    "clever",
    "tired",
    "bright",
    "dark",
    "heavy",
    "light",
]
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "brown", "grey", "pink", "orange", "purple"]
VERBS = ["sees", "finds", "likes", "follows", "hears", "helps", "meets", "wants", "carries", "watches"]
PLACES = [
    "garden",
    "kitchen",
    "forest",
    "house",
    "barn",
    "street",
    "field",
    "river",
    "school",
    "shop",
    "tower",
    "valley",
    "market",
    "bridge",
]
ROOMS = ["kitchen", "bedroom", "hall", "bathroom", "office", "cellar", "attic", "garage", "library", "nursery"]
FIELDS = [
    "name",
    "age",
    "city",
    "size",
    "price",
    "colour",
    "weight",
    "height",
    "width",
    "count",
    "score",
    "title",
    "owner",
    "year",
    "email",
    "level",
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]


def sentence(rng: Random) -> str:
    """A sentence in lower case without a full stop: 'the old fox sees a lamp in the garden'."""
    who = f"the {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}"
    return f"{who} {rng.choice(VERBS)} the {rng.choice(THINGS)} in the {rng.choice(PLACES)}"


def several(rng: Random, words: list[str], least: int, most: int) -> list[str]:
    """``least`` to ``most`` different words."""
    return rng.sample(words, rng.randint(least, most))


def enumerated(words: list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def field_value(rng: Random, field: str) -> str | int:
    """A value that fits a field of `FIELDS`."""
    if field in ("name", "owner", "title"):
        return rng.choice(PEOPLE)
    if field == "city":
        return rng.choice(CITIES)
    if field == "colour":
        return rng.choice(COLOURS)
    if field == "email":
        return f"{rng.choice(PEOPLE).lower()}@example.com"
    return rng.randint(1900, 2030) if field == "year" else rng.randint(1, 99)
