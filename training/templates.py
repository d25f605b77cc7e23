"""Prompts made from templates: code, arithmetic, trivia, German sentences, chat instructions, follow-ups.

Everything here is our own wording, combined at random. Knows nothing of tokens.
"""

from __future__ import annotations

import random


def _split(text: str) -> list[str]:
    return text.replace("\n", "").split("|")


TOPICS = _split("""
artificial intelligence|climate change|the French Revolution|photosynthesis|black holes|the stock market|
healthy eating|remote work|the Roman Empire|electric cars|time management|renewable energy|jazz music|
volcanoes|the human heart|blockchain|ancient Egypt|plate tectonics|the immune system|supply and demand|
public speaking|meditation|quantum mechanics|the water cycle|world war two|the solar system|
machine learning|gardening|chess|social media|vaccines|evolution|the industrial revolution|poetry|inflation|
learning a language|space travel|cooking pasta|sleep|ocean currents|the internet|democracy|
mountain climbing|dinosaurs|coffee|urban planning|robotics|the Great Wall of China|probability|
stress at work|photography|beekeeping|the printing press|antibiotics|game theory|DNA|relativity|recycling|
the Renaissance|budgeting|a job interview|online privacy|the periodic table|earthquakes|opera|
microeconomics|the Silk Road|solar panels|parenting|football|video games|architecture|glaciers
""")
PLACES = _split("""
Dublin|Paris|Tokyo|Iceland|New York|Rome|Kenya|Peru|Barcelona|Sydney|Istanbul|Norway|Vietnam|Berlin|Cairo|
Scotland|Mexico City|Singapore|Lisbon|Canada|Prague|Morocco|Chicago|India|Brazil
""")
NAMES = _split("""
Anna|Ben|Carla|David|Emma|Felix|Grace|Hugo|Irene|Jonas|Karen|Leo|Maria|Noah|Olivia|Paul|Quinn|Rosa|Sam|Tina|
Uma|Victor|Wendy|Xavier|Yara|Zoe
""")
ROLES = _split("""
a pirate captain|a medieval knight|a stand-up comedian|a physics professor|a detective from the 1920s|
a robot who has just woken up|a travel guide|a chef|Sherlock Holmes|an ancient philosopher|a doctor|
a lawyer|a football coach|a time traveller|a talking cat|a software architect|a kindergarten teacher|
a historian|a financial adviser|an English teacher who corrects my sentences|a job interviewer|
a science fiction author
""")
TASKS = _split("""
reverse a string|check whether a number is prime|compute the n-th Fibonacci number|
sort tuples by the second item|count the words in a text file|merge two sorted lists|
find the longest common prefix|parse a CSV file|implement a binary search|find all duplicates in a list|
compute the factorial of a number|validate an email address|build a simple HTTP server|
implement a queue with two stacks|flatten a nested list|compute a moving average|
find the shortest path in a graph|convert Roman numerals to integers|check for balanced brackets|
remove vowels from a string|find the median of an array|transpose a matrix|
generate all permutations of a string|read JSON from a URL|implement a linked list|
count inversions in an array|find the largest sum of a subarray|compute the greatest common divisor|
rotate an array by k places|group anagrams together
""")
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "C++", "Java", "Go", "Rust", "SQL", "Bash", "HTML")

CHAT = (
    "Write a short blog post about {topic}.",
    "I have {n} days in {place}. What should I see?",
    "Write a polite email to {name} to put off our meeting about {topic}.",
    "Explain {topic} to a ten-year-old.",
    "Explain {topic} in simple terms and give two examples.",
    "What are the advantages and disadvantages of {topic}?",
    "Give me {n} tips about {topic}.",
    "List {n} facts about {topic}.",
    "Write a story of about {words} words that begins with: '{name} had never believed in ghosts.'",
    "Write a poem about {topic}.",
    "Compare {topic} with {topic2}.",
    "Imagine you are {role}. Introduce yourself and tell me about {topic}.",
    "Answer as {role} would. What do you think about {topic}?",
    "Act as {role}. I will ask you questions. My first one: how did you get interested in {topic}?",
    "Outline a presentation on {topic} with headings and key points. Use fewer than {words} words.",
    "How would you persuade a friend to learn about {topic}?",
    "What is the connection between {topic} and {topic2}?",
    "Describe a vivid scene in {place} at night.",
    "Write a dialogue between {name} and {name2} about {topic}.",
    "What should a beginner know about {topic}?",
    "Write a headline and the first paragraph of a news article about {topic} in {place}.",
    "Create a {n}-day plan to learn about {topic}.",
    "Provide insights into the history of {topic} and its effect on society.",
    "Which factors have shaped {topic}? Discuss with examples.",
    "Is it right to spend public money on {topic}? Argue for both sides.",
    "Describe the process of {topic} step by step and name its main stages.",
    "Design an experiment to test a claim about {topic}.",
    "Extract the names and places from this sentence and give them as JSON: '{name} met {name2} in {place} to talk "
    "about {topic}.'",
    "Correct this sentence: 'yesterday {name} go to {place} and talk with {name2} about {topic}'.",
    "Is this positive or negative: '{place} was lovely, but too expensive'? Answer with one word.",
    "{name} is older than {name2}, and {name2} is older than Kim. Who is the oldest?",
)
CODE = (
    "Write a {lang} function to {task}.",
    "Write a {lang} program that can {task}. Explain how it works.",
    "How do I {task} in {lang}?",
    "Implement a function in {lang} to {task} and give its time complexity.",
    "Write unit tests for a {lang} function that should {task}.",
)
CODE_PREFIX = (
    'def {function}({argument}):\n    """{sentence}.\n\n    >>> {function}(',
    'import math\n\n\ndef {function}({argument}):\n    """ {sentence}.\n    """\n',
    "# {sentence}\ndef {function}({argument}):\n",
)
ARITHMETIC = (
    "What is {a} + {b}?", "What is {a} times {c}?", "Compute {a} - {b} + {c}.", "Solve for x: {c}x + {d} = {b}",
    "What is {d}% of {a}?", "A train travels {a} km in {c} hours. What is its average speed?",
    "{name} has {d} apples and buys {c} more bags with {e} apples each. How many apples does {name} have now?",
    "{name} earns ${e} an hour and works {d} hours a week. How much does {name} earn in {c} weeks?",
    "The sides of a rectangle are {d} and {e}. What are its area and its perimeter?",
    "If f(x) = {c}x^2 - {d}x + {e}, what is f({n})?",
    "A shop sells pens at ${c} each and gives {d}% off for more than {n} pens. What do {e} pens cost?",
    "There are {e} red and {d} blue balls in a bag. What is the probability of drawing a red ball?",
    "{name} read {d} pages on Monday and twice as many on Tuesday. The book has {a} pages. How many are left?",
    "Find the next number in the sequence: {c}, {d}, {e}, ...",
)  # fmt: skip
QUESTIONS = (
    "who played {name} in {title}?", "who sings the song {title}?", "when was {title} released?",
    "where is {place} located?", "who wrote {title}?", "what is the capital of {country}?",
    "when did {country} join the {org}?", "who won the {year} {cup}?", "where was the {year} {cup} held?",
    "how many episodes are in season {n} of {title}?", "what is the meaning of the word {word}?",
    "who is the president of {country}?", "what does {abbr} stand for?", "who invented {thing}?",
    "when was {thing} invented?", "what is the population of {place}?", "how tall is {thing2}?",
    "what language do they speak in {country}?", "who discovered {word}?", "which part of the body is the {organ} in?",
    "what is the function of the {organ}?", "who is the voice of {name} in {title}?", "where did {thing} come from?",
    "how common is the name {surname}?", "when does the new season of {title} start?",
    "what year did {title} come out?", "how far away is {thing2}?",
    "how many teams are in the {cup}?", "who has scored the most goals in the {cup}?", "what is {thing} made of?",
    "where is {title} filmed?", "why is {thing2} important?",
    "what type of animal is the {animal}?", "what is the difference between {word} and {word2}?",
)  # fmt: skip
_FILL = {
    "title": """The Golden Garden|Lost in the Rain|Star Voyage|Once in a Summer|The Last Kingdom|Friends and Rivals|
Midnight Train|Breaking Point|The Lord of the Woods|Under the Same Sky|Home Alone Again|Game of Shadows|River of Dreams|
The Walking Stones|House of Paper|Love Me Twice|The Great Race|Dancing Queen|The Simpsons|Stranger Days|Jane Eyre|
Romeo and Juliet|The Office|Star Trek|Titanic|Harry Potter|The Jungle Book|Frozen|Casablanca|Hotel California""",
    "country": """Germany|Spain|Australia|Egypt|Japan|Sweden|Argentina|Turkey|Poland|South Africa|Ireland|Thailand|
Greece|Ukraine|Chile|Nigeria|Portugal|Finland|Pakistan|Austria""",
    "org": "European Union|United Nations|NATO|World Trade Organization|Commonwealth|league of nations",
    "cup": """world cup|super bowl|winter olympics|world series|champions league|cricket world cup|
stanley cup|summer olympics|us open|tour de france|eurovision song contest""",
    "year": "1966|1974|1986|1990|1994|1998|2002|2006|2008|2010|2012|2014|2015|2016|2017|2018",
    "word": """osmosis|democracy|gravity|oxygen|entropy|mitosis|algorithm|irony|metaphor|inertia|friction|penicillin|
catalyst|habitat|monarchy|tundra|enzyme|isotope|sonnet|tariff|genre|fossil""",
    "abbr": "NASA|UNICEF|DNA|ATM|SCUBA|LASER|FBI|HTML|GPS|UNESCO|IMF|BBC|CPU|RSVP|PDF|WHO",
    "thing": """the telephone|the light bulb|paper|the steam engine|glass|the bicycle|chocolate|the compass|the zipper|
basketball|steel|the microscope|soap|the piano|gunpowder|cement|the guitar""",
    "thing2": "the moon|mount everest|the eiffel tower|the statue of liberty|the amazon river|the great barrier reef",
    "organ": "heart|liver|pancreas|kidney|cerebellum|retina|femur|thyroid gland|spleen|aorta|bladder|small intestine",
    "surname": "Fischer|Kelly|Lopez|Nguyen|Walker|Cohen|Rossi|Novak|Silva|Murphy|Larsen|Baker|Young|Chavez",
    "animal": "lion|owl|wolf|whale|bear|eagle|platypus|octopus|fox|tiger|penguin|beetle|frog",
}
FILL = {key: _split(value) for key, value in _FILL.items()}

FOLLOWUPS = (
    "Rewrite your previous response as a list.", "Can you make that shorter?", "Now explain it to a child.",
    "Can you give me an example?", "Say it again in other words.",
    "Why is that?", "Tell me more about the first point.",
    "Translate your answer into German.", "Now write it as a poem.", "Summarize this in one sentence.",
    "Are you sure? Please check your answer.", "What are the counterarguments?", "Rewrite it in a formal tone.",
    "What if the numbers were doubled?", "Can you improve on this and explain what you changed?", "Continue.",
    "Give me a title for it that begins with the letter {letter}.", "Thanks! What should I do next?",
    "How does this relate to {topic}?", "Write the same thing as a dialogue between {name} and {name2}.",
    "Write this in the style of {role}.", "What are the three most important words in your answer?",
    "Is there another way to solve this?", "Now do the same for {topic}.", "Convert your answer to JSON.",
    "Which of these would you choose, and why?", "Add comments to it and handle errors.", "Can you elaborate?",
)  # fmt: skip

# What the target is made to begin a user's turn with; the rest of the turn it writes itself.
OPENINGS = (
    "", "", "", "", "", "", "", "", "Who ", "When did ", "When was ", "Where is ", "Where did ", "What is ",
    "What does ",
    "How many ", "Who played ", "Who wrote ", "Which ", "Why do ", "How do I ", "Write a ", "Write an ", "Compose ",
    "Draft a ", "Imagine you are ", "Describe ", "Explain ", "Can you ", "Suppose ", "Given ", "Solve ", "Calculate ",
    "Evaluate the following ", "Extract ", "Identify ", "Discuss ", "Provide ", "Please ", "I have ", "Help me ",
    "Summarize: ", "Translate German to English: ", "Translate German to English: Die ", "Translate German to English: "
    "Der ", "Translate German to English: Ich ", "Translate German to English: In ", "Translate to English: ", "def ",
    "Implement ", "Consider ", "If ", "Two ", "Tom ", "A farmer ", "Pretend ", "You are ", "Act as ", "Compare ",
)  # fmt: skip

_SUBJECTS = _split("""
Die Regierung|Der Präsident|Die Polizei|Der Verein|Die Firma|Das Unternehmen|Die Stadt|Der Bürgermeister|
Die Universität|Ein Sprecher|Die Partei|Der Minister|Die Mannschaft|Der Trainer|Das Gericht|Die Feuerwehr|
Der Künstler|Die Schule|Die Bank|Der Autor|Eine Frau|Ein Mann|Die Eltern|Die Forscher|Der Arzt|Das Museum|
Die Gemeinde|Der Chef|Er|Sie|Mein Bruder|Die Nachbarin|Der Konzern|Die Kommission|Das Parlament|
Die Bevölkerung|Der Verband
""")
_VERBS = _split("""
hat|will|plant|kündigt|sucht|zeigt|fordert|beginnt mit|feiert|verliert|gewinnt|verkauft|baut|eröffnet|
kritisiert|erwartet|unterstützt|verspricht|braucht|bekommt|prüft|beschreibt|verteidigt|erklärt
""")
_OBJECTS = _split("""
ein neues Gebäude|die Reform|das Spiel|mehr Geld|eine Lösung|die Zukunft|den Vertrag|die Ergebnisse|
eine Ausstellung|den Preis|das Projekt|die Straße|ein altes Haus|den Plan|die Wahl|das Festival|
eine große Rolle|die Krise|neue Arbeitsplätze|den Bericht|das Gesetz|die Sicherheit|eine Entscheidung|
den Verkehr|die Kosten|das Bild|ein Konzert|die Vorwürfe|den Umbau der Kirche|einen Film über den Krieg|
die Gespräche mit den Nachbarn
""")
_TIMES = _split("""
am Montag|am Wochenende|im Sommer|seit zwei Jahren|vor dem Winter|in Berlin|in der Innenstadt|
trotz der Kritik|nach Angaben der Behörden|im kommenden Jahr|in diesem Monat|bereits zum dritten Mal|
wegen der hohen Nachfrage|mit großem Erfolg|ohne Ergebnis|in den Vereinigten Staaten|auf dem Markt|
bis zum Ende des Jahres|rund um die Uhr
""")
_CLAUSES = (
    " , weil die Menschen das so wollen", " , obwohl viele dagegen sind", " , sagte er am Dienstag", " , wie es heißt",
    " , die in der Nacht gearbeitet hatten", " und hofft auf bessere Zeiten", " , um die Bürger zu schützen",
    " , ohne dass jemand verletzt wurde", " ; doch die Zahl der Besucher sinkt", " , was niemand erwartet hatte",
    " , da die Preise weiter steigen", " und wurde später dafür ausgezeichnet", " - ein Erfolg für die ganze Region",
    " , sobald das Wetter besser wird", " , heißt es in einer Mitteilung", "", "", "", "", "",
)  # fmt: skip
_GERMAN = (
    "{subject} {verb} {object} {time}{clause} .", "{Time} {verb} {subject2} {object}{clause} .",
    "Nicht nur {subject2} , sondern auch {subject3} {verb} {object} .", "{subject} : {Object} {time}",
    "Warum {verb} {subject2} {object} {time} ?", "Es ist bekannt , dass {subject2} {object} {verb}{clause} .",
    "\" {subject} {verb} {object} \" , sagte {name} {time} .", "Wenn {subject2} {object} {verb} , wird es schwierig .",
    "{name} aus {place} glaubt nicht , dass {subject2} {object} {verb} .",
    "{number} Menschen warten {time} auf {object}.",
    "{subject} {verb} {object} , und {subject2} {verb2} {object2} {time} .",
    "Ich weiß nicht , ob {subject2} {object} {verb} .",
)  # fmt: skip


def fill(template: str, rng: random.Random) -> str:
    """A template with every field drawn at random."""
    values: dict[str, object] = {key: rng.choice(options) for key, options in FILL.items()}
    values |= {
        "topic": rng.choice(TOPICS), "topic2": rng.choice(TOPICS), "place": rng.choice(PLACES),
        "name": rng.choice(NAMES), "name2": rng.choice(NAMES), "role": rng.choice(ROLES), "n": rng.randint(2, 10),
        "words": rng.choice((50, 100, 150, 200)), "lang": rng.choice(LANGUAGES), "task": rng.choice(TASKS),
        "a": rng.randint(20, 999), "b": rng.randint(10, 500), "c": rng.randint(2, 12), "d": rng.randint(3, 40),
        "e": rng.randint(5, 60), "letter": rng.choice("ABCDEFGHILMNOPRST"), "word2": rng.choice(FILL["word"]),
    }  # fmt: skip
    return template.format(**values)


def code_prefix(rng: random.Random) -> str:
    """The beginning of a Python function, to be continued without a chat."""
    task = rng.choice(TASKS)
    words = task.lower().replace("-", "_").split()
    return rng.choice(CODE_PREFIX).format(
        function="_".join(words[: rng.randint(2, 4)]),
        argument=rng.choice(("n", "values", "text: str", "numbers: List[int]", "a, b", "items", "s: str, k: int")),
        sentence=task[0].upper() + task[1:],
    )


def german_sentence(rng: random.Random) -> str:
    """Something like a German headline or sentence, with the spaced punctuation of tokenized corpora now and then."""
    subjects = [rng.choice(_SUBJECTS) for _ in range(3)]
    objects = [rng.choice(_OBJECTS) for _ in range(2)]
    time = rng.choice(_TIMES)
    text = rng.choice(_GERMAN).format(
        subject=subjects[0], subject2=_lower(subjects[1]), subject3=_lower(subjects[2]), verb=rng.choice(_VERBS),
        verb2=rng.choice(_VERBS), object=objects[0], object2=objects[1], Object=_upper(objects[0]), time=time,
        Time=_upper(time), clause=rng.choice(_CLAUSES), name=rng.choice(NAMES), place=rng.choice(PLACES),
        number=rng.randint(3, 9000),
    )  # fmt: skip
    return text if rng.random() < 0.6 else text.replace(" ,", ",").replace(" .", ".").replace(" ?", "?")


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
