"""Household sentences in English, German and Spanish, each with its English translation.

A *frame* is one meaning: templates of the three languages with slots (a device, a room, a time ...). Filling the
slots gives a sentence in every language at once, so a translation is right by construction. A language may word a
frame in several ways; the translation is always the first English wording. Numbers are written as words throughout.

Everything here is pure: a sentence depends on the random generator passed in and on nothing else.
"""

import hashlib
import random
from dataclasses import dataclass
from functools import cache

LANGUAGES = ("en", "de", "es")
HELD_OUT_SHARE = 0.12
"""The share of meanings that are kept out of training, by a hash of the canonical English text."""


class Word(str):
    """A word or phrase; German noun phrases (nominative, singular) also know their other cases."""

    def _article(self, forms: dict[str, str]) -> str:
        article, _, rest = self.partition(" ")
        return f"{forms.get(article, article)} {rest}" if rest else str(self)

    @property
    def acc(self) -> str:
        """The German accusative."""
        return self._article({"der": "den", "mein": "meinen"})

    @property
    def dat(self) -> str:
        """The German dative."""
        return self._article({"der": "dem", "die": "der", "das": "dem", "mein": "meinem", "meine": "meiner"})


@dataclass(frozen=True)
class Sentence:
    """A sentence as spoken, its English translation, and the meaning by which it is held out or not."""

    language: str
    text: str
    translation: str
    meaning: str
    held_out: bool


@dataclass(frozen=True)
class Frame:
    """A meaning with slots: the wordings of each language, the slots' names, and whether it is an order."""

    en: tuple[str, ...]
    de: tuple[str, ...]
    es: tuple[str, ...]
    order: bool = False
    weight: float = 1.0


def _words(table: str) -> tuple[dict[str, Word], ...]:
    """Entries 'en | de | es', one a line."""
    rows = (line.split("|") for line in table.strip().splitlines())
    return tuple(dict(zip(LANGUAGES, (Word(cell.strip()) for cell in row), strict=True)) for row in rows)


# ---------------------------------------------------------------------------------------------------- numbers

_EN_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_EN_TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_DE_ONES = (
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn "
    "sechzehn siebzehn achtzehn neunzehn"
).split()
_DE_TENS = ("null zehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig").split()
_ES_ONES = (
    "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince "
    "dieciséis diecisiete dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro "
    "veinticinco veintiséis veintisiete veintiocho veintinueve"
).split()
_ES_TENS = ("cero diez veinte treinta cuarenta cincuenta sesenta setenta ochenta noventa").split()


def number(n: int) -> dict[str, Word]:
    """The number 0 to 99 in words, in each language."""
    tens, ones = divmod(n, 10)
    if n < 20:
        en, de = _EN_ONES[n], _DE_ONES[n]
    else:
        en = _EN_TENS[tens] + (f" {_EN_ONES[ones]}" if ones else "")
        de = ("ein" if ones == 1 else _DE_ONES[ones]) + "und" + _DE_TENS[tens] if ones else _DE_TENS[tens]
    es = _ES_ONES[n] if n < 30 else _ES_TENS[tens] + (f" y {_ES_ONES[ones]}" if ones else "")
    return {"en": Word(en), "de": Word(de), "es": Word(es)}


def digits(rng: random.Random) -> dict[str, Word]:
    """Three to six digits, spoken one by one."""
    values = [number(rng.randrange(10)) for _ in range(rng.randint(3, 6))]
    return {code: Word(" ".join(value[code] for value in values)) for code in LANGUAGES}


def clock(rng: random.Random) -> dict[str, Word]:
    """A time of day as the object of 'at': 'seven o'clock', 'seven thirty'."""
    hour, minute = rng.randint(2, 12), rng.choice((0, 0, 5, 10, 15, 20, 25, 30, 30, 40, 45, 50, 55))
    h, m = number(hour), number(minute)
    if minute == 0:
        return {"en": Word(f"{h['en']} o'clock"), "de": Word(f"{h['de']} Uhr"), "es": Word(f"las {h['es']}")}
    m_en = "oh five" if minute == 5 else m["en"]
    return {
        "en": Word(f"{h['en']} {m_en}"),
        "de": Word(f"{h['de']} Uhr {m['de']}"),
        "es": Word(f"las {h['es']} y {m['es']}"),
    }


def shopping(rng: random.Random) -> dict[str, Word]:
    """One to three things to buy: 'milk, bread and cheese'."""
    things = rng.sample(GOODS, rng.choice((1, 2, 2, 3)))
    joined = {}
    for code, conjunction in zip(LANGUAGES, ("and", "und", "y"), strict=True):
        names = [thing[code] for thing in things]
        head = ", ".join(names[:-1])
        joined[code] = Word(f"{head} {conjunction} {names[-1]}" if head else names[-1])
    return joined


# ---------------------------------------------------------------------------------------------------- lexicon

DEVICES = _words("""
the lamp | die Lampe | la lámpara
the light | das Licht | la luz
the heating | die Heizung | la calefacción
the fan | der Ventilator | el ventilador
the television | der Fernseher | el televisor
the radio | das Radio | la radio
the computer | der Computer | el ordenador
the printer | der Drucker | la impresora
the camera | die Kamera | la cámara
the air conditioner | die Klimaanlage | el aire acondicionado
the loudspeaker | der Lautsprecher | el altavoz
the socket | die Steckdose | el enchufe
""")
MACHINES = _words("""
the washing machine | die Waschmaschine | la lavadora
the dishwasher | die Spülmaschine | el lavavajillas
the vacuum cleaner | der Staubsauger | la aspiradora
the coffee machine | die Kaffeemaschine | la cafetera
the oven | der Backofen | el horno
the dryer | der Trockner | la secadora
the lawn mower | der Rasenmäher | el cortacésped
the toaster | der Toaster | la tostadora
""")
OPENINGS = _words("""
the door | die Tür | la puerta
the window | das Fenster | la ventana
the curtain | der Vorhang | la cortina
the blind | das Rollo | la persiana
the gate | das Tor | el portón
the cupboard | der Schrank | el armario
the roof | das Dach | el techo
the letter box | der Briefkasten | el buzón
""")
ROOMS = _words("""
in the kitchen | in der Küche | en la cocina
in the bathroom | im Badezimmer | en el baño
in the bedroom | im Schlafzimmer | en el dormitorio
in the living room | im Wohnzimmer | en el salón
in the garden | im Garten | en el jardín
in the cellar | im Keller | en el sótano
in the garage | in der Garage | en el garaje
in the office | im Büro | en la oficina
in the hall | im Flur | en el pasillo
in the nursery | im Kinderzimmer | en el cuarto de los niños
in the attic | auf dem Dachboden | en el desván
on the balcony | auf dem Balkon | en el balcón
in the dining room | im Esszimmer | en el comedor
on the terrace | auf der Terrasse | en la terraza
""")
DAYS = _words("""
on Monday | am Montag | el lunes
on Tuesday | am Dienstag | el martes
on Wednesday | am Mittwoch | el miércoles
on Thursday | am Donnerstag | el jueves
on Friday | am Freitag | el viernes
on Saturday | am Samstag | el sábado
on Sunday | am Sonntag | el domingo
today | heute | hoy
tomorrow | morgen | mañana
this evening | heute Abend | esta noche
at the weekend | am Wochenende | el fin de semana
""")
PLACES = _words("""
in Berlin | in Berlin | en Berlín
in Madrid | in Madrid | en Madrid
in London | in London | en Londres
in Vienna | in Wien | en Viena
in Paris | in Paris | en París
in Rome | in Rom | en Roma
in Hamburg | in Hamburg | en Hamburgo
in Seville | in Sevilla | en Sevilla
in the mountains | in den Bergen | en las montañas
on the coast | an der Küste | en la costa
""")
GOODS = _words("""
milk | Milch | leche
bread | Brot | pan
cheese | Käse | queso
butter | Butter | mantequilla
sugar | Zucker | azúcar
salt | Salz | sal
rice | Reis | arroz
coffee | Kaffee | café
tea | Tee | té
flour | Mehl | harina
honey | Honig | miel
apples | Äpfel | manzanas
tomatoes | Tomaten | tomates
potatoes | Kartoffeln | patatas
onions | Zwiebeln | cebollas
lemons | Zitronen | limones
eggs | Eier | huevos
soap | Seife | jabón
batteries | Batterien | pilas
chocolate | Schokolade | chocolate
fish | Fisch | pescado
water | Wasser | agua
""")
COUNTED = _words("""
eggs | Eier | huevos
apples | Äpfel | manzanas
lemons | Zitronen | limones
bottles | Flaschen | botellas
plates | Teller | platos
glasses | Gläser | vasos
spoons | Löffel | cucharas
chairs | Stühle | sillas
books | Bücher | libros
candles | Kerzen | velas
boxes | Kisten | cajas
towels | Handtücher | toallas
""")
MUSIC = _words("""
some jazz | etwas Jazz | algo de jazz
some rock | etwas Rock | algo de rock
classical music | klassische Musik | música clásica
quiet music | ruhige Musik | música tranquila
dance music | Tanzmusik | música de baile
the news | die Nachrichten | las noticias
a fairy tale | ein Märchen | un cuento
an audiobook | ein Hörbuch | un audiolibro
birdsong | Vogelgesang | el canto de los pájaros
old songs | alte Lieder | canciones viejas
""")
PEOPLE = _words("""
Anna | Anna | Ana
Martin | Martin | Martín
Laura | Laura | Laura
Peter | Peter | Pedro
my mother | meine Mutter | mi madre
my father | mein Vater | mi padre
my sister | meine Schwester | mi hermana
my brother | mein Bruder | mi hermano
the doctor | der Arzt | el médico
the neighbour | die Nachbarin | la vecina
the school | die Schule | la escuela
the plumber | der Klempner | el fontanero
""")
CHORES = _words("""
water the plants | die Pflanzen zu gießen | regar las plantas
feed the cat | die Katze zu füttern | dar de comer al gato
walk the dog | den Hund auszuführen | pasear al perro
take out the rubbish | den Müll rauszubringen | sacar la basura
pay the bill | die Rechnung zu bezahlen | pagar la factura
clean the windows | die Fenster zu putzen | limpiar las ventanas
buy a present | ein Geschenk zu kaufen | comprar un regalo
wash the car | das Auto zu waschen | lavar el coche
take the medicine | die Medizin zu nehmen | tomar la medicina
bake a cake | einen Kuchen zu backen | hacer un pastel
iron the shirts | die Hemden zu bügeln | planchar las camisas
repair the bicycle | das Fahrrad zu reparieren | arreglar la bicicleta
""")
THINGS = _words("""
the key | der Schlüssel | la llave
the ball | der Ball | la pelota
the umbrella | der Regenschirm | el paraguas
the book | das Buch | el libro
the bag | die Tasche | la bolsa
the telephone | das Telefon | el teléfono
the cup | die Tasse | la taza
the hat | der Hut | el sombrero
the clock | die Uhr | el reloj
the letter | der Brief | la carta
the knife | das Messer | el cuchillo
the blanket | die Decke | la manta
the basket | der Korb | la cesta
the newspaper | die Zeitung | el periódico
""")
FURNITURE = _words("""
the table | der Tisch | la mesa
the bed | das Bett | la cama
the sofa | das Sofa | el sofá
the chair | der Stuhl | la silla
the shelf | das Regal | la estantería
the piano | das Klavier | el piano
the fridge | der Kühlschrank | el frigorífico
the carpet | der Teppich | la alfombra
""")
POSITIONS = _words("""
under | unter | debajo de
behind | hinter | detrás de
next to | neben | al lado de
on | auf | encima de
in front of | vor | delante de
""")
COLOURS = _words("""
green | grün | verde
blue | blau | azul
grey | grau | gris
orange | orange | naranja
brown | braun | marrón
pink | rosa | rosa
huge | riesig | enorme
lovely | hübsch | agradable
""")
STATES = _words("""
too warm | zu warm | demasiado calor
very cold | sehr kalt | mucho frío
very hot | sehr heiß | mucho calor
a little cool | etwas kühl | un poco de fresco
""")
WEATHER = _words("""
rain | regnen | lloverá
snow | schneien | nevará
be sunny | sonnig sein | hará sol
be windy | windig sein | hará viento
be cold | kalt sein | hará frío
be warm | warm sein | hará calor
be foggy | neblig sein | habrá niebla
""")
VEHICLES = _words("""
the train | der Zug | el tren
the bus | der Bus | el autobús
the ship | das Schiff | el barco
the plane | das Flugzeug | el avión
the taxi | das Taxi | el taxi
the tram | die Straßenbahn | el tranvía
""")
MEALS = _words("""
breakfast | das Frühstück | el desayuno
lunch | das Mittagessen | el almuerzo
dinner | das Abendessen | la cena
the party | die Feier | la fiesta
the meeting | die Besprechung | la reunión
the concert | das Konzert | el concierto
the lesson | der Unterricht | la clase
""")
FOODS = _words("""
the soup | die Suppe | la sopa
the salad | der Salat | la ensalada
the pizza | die Pizza | la pizza
the cake | der Kuchen | el pastel
the fish | der Fisch | el pescado
the chicken | das Hähnchen | el pollo
the rice | der Reis | el arroz
the bread | das Brot | el pan
""")
TASTES = _words("""
is ready | ist fertig | está a punto
needs more salt | braucht mehr Salz | necesita más sal
is still cold | ist noch kalt | todavía no está caliente
smells good | riecht gut | huele bien
tastes wonderful | schmeckt wunderbar | sabe de maravilla
is in the oven | ist im Ofen | está en el horno
""")

SLOTS = {
    "device": DEVICES,
    "machine": MACHINES,
    "opening": OPENINGS,
    "room": ROOMS,
    "day": DAYS,
    "place": PLACES,
    "counted": COUNTED,
    "music": MUSIC,
    "person": PEOPLE,
    "chore": CHORES,
    "thing": THINGS,
    "furniture": FURNITURE,
    "position": POSITIONS,
    "colour": COLOURS,
    "state": STATES,
    "weather": WEATHER,
    "vehicle": VEHICLES,
    "meal": MEALS,
    "food": FOODS,
    "taste": TASTES,
    "degrees": tuple(map(number, range(2, 36))),
    "percent": tuple(map(number, range(5, 100, 5))),
    "count": tuple(map(number, (*range(2, 21), 30, 40, 50))),
    "minutes": tuple(map(number, range(2, 60))),
    "n": tuple(map(number, range(2, 100))),
    "m": tuple(map(number, range(2, 100))),
    "digits": digits,
    "clock": clock,
    "shopping": shopping,
}

# ---------------------------------------------------------------------------------------------------- frames

_ORDERS = (
    (
        ("Turn on {device} {room}", "Switch on {device} {room}"),
        ("Schalte {device.acc} {room} ein", "Mach {device.acc} {room} an"),
        ("Enciende {device} {room}", "Pon en marcha {device} {room}"),
    ),
    (
        ("Turn off {device} {room}", "Switch off {device} {room}"),
        ("Schalte {device.acc} {room} aus", "Mach {device.acc} {room} aus"),
        ("Apaga {device} {room}",),
    ),
    (("Turn off {device} at {clock}",), ("Schalte {device.acc} um {clock} aus",), ("Apaga {device} a {clock}",)),
    (
        ("Turn on {device} {day} at {clock}",),
        ("Schalte {device.acc} {day} um {clock} ein",),
        ("Enciende {device} {day} a {clock}",),
    ),
    (
        ("Start {machine} in {minutes} minutes",),
        ("Starte {machine.acc} in {minutes} Minuten",),
        ("Arranca {machine} dentro de {minutes} minutos",),
    ),
    (("Start {machine} {room}",), ("Starte {machine.acc} {room}",), ("Arranca {machine} {room}",)),
    (
        ("Stop {machine} {room}",),
        ("Stoppe {machine.acc} {room}", "Halte {machine.acc} {room} an"),
        ("Detén {machine} {room}",),
    ),
    (
        ("Open {opening} {room}",),
        ("Öffne {opening.acc} {room}", "Mach {opening.acc} {room} auf"),
        ("Abre {opening} {room}",),
    ),
    (
        ("Close {opening} {room}", "Shut {opening} {room}"),
        ("Schließe {opening.acc} {room}", "Mach {opening.acc} {room} zu"),
        ("Cierra {opening} {room}",),
    ),
    (
        ("Set the temperature {room} to {degrees} degrees",),
        ("Stelle die Temperatur {room} auf {degrees} Grad",),
        ("Pon la temperatura {room} a {degrees} grados",),
    ),
    (
        ("Dim the light {room} to {percent} percent",),
        ("Dimme das Licht {room} auf {percent} Prozent",),
        ("Baja la luz {room} al {percent} por ciento",),
    ),
    (
        ("Set the volume {room} to {percent} percent",),
        ("Stelle die Lautstärke {room} auf {percent} Prozent",),
        ("Pon el volumen {room} al {percent} por ciento",),
    ),
    (
        ("Set a timer for {minutes} minutes",),
        ("Stelle einen Timer auf {minutes} Minuten",),
        ("Pon un temporizador de {minutes} minutos",),
    ),
    (
        ("Wake me up {day} at {clock}",),
        ("Wecke mich {day} um {clock}", "Weck mich {day} um {clock} auf"),
        ("Despiértame {day} a {clock}",),
    ),
    (("Remind me {day} to {chore}",), ("Erinnere mich {day} daran, {chore}",), ("Recuérdame {day} {chore}",)),
    (
        ("Remind me at {clock} to {chore}",),
        ("Erinnere mich um {clock} daran, {chore}",),
        ("Recuérdame a {clock} {chore}",),
    ),
    (
        ("Put {shopping} on the shopping list", "Write {shopping} on the shopping list"),
        ("Setze {shopping} auf die Einkaufsliste", "Schreib {shopping} auf die Einkaufsliste"),
        ("Pon {shopping} en la lista de la compra", "Apunta {shopping} en la lista de la compra"),
    ),
    (("Buy {shopping} {day}",), ("Kaufe {day} {shopping}",), ("Compra {shopping} {day}",)),
    (("Play {music} {room}",), ("Spiele {music} {room}",), ("Reproduce {music} {room}",)),
    (("Play {music} at {clock}",), ("Spiele um {clock} {music}",), ("Reproduce {music} a {clock}",)),
    (("Call {person} {day}", "Phone {person} {day}"), ("Rufe {person.acc} {day} an",), ("Llama a {person} {day}",)),
    (("Call {person} at {clock}",), ("Rufe {person.acc} um {clock} an",), ("Llama a {person} a {clock}",)),
    (("Dial {digits}",), ("Wähle {digits}",), ("Marca {digits}",)),
    (
        ("Bring me {thing}, it is {position} {furniture}",),
        ("Bring mir {thing.acc}, {position} {furniture.dat}",),
        ("Tráeme {thing}, está {position} {furniture}",),
    ),
)
_STATEMENTS = (
    (("{digits}.",), ("{digits}.",), ("{digits}.",), 2.5),
    (
        ("The code is {digits}.", "My code is {digits}."),
        ("Der Code lautet {digits}.", "Mein Code ist {digits}."),
        ("El código es {digits}.", "Mi código es {digits}."),
        1.2,
    ),
    (
        ("My telephone number is {digits}.",),
        ("Meine Telefonnummer ist {digits}.",),
        ("Mi número de teléfono es {digits}.",),
        1.0,
    ),
    (("How warm is it {room}?",), ("Wie warm ist es {room}?",), ("¿Qué temperatura hace {room}?",), 0.4),
    (
        ("Is {device} {room} still on?",),
        ("Ist {device} {room} noch an?",),
        ("¿Todavía funciona {device} {room}?",),
        1.0,
    ),
    (
        ("What will the weather be like {day} {place}?",),
        ("Wie wird das Wetter {day} {place}?",),
        ("¿Qué tiempo hará {day} {place}?",),
        1.2,
    ),
    (("Will it {weather} {day} {place}?",), ("Wird es {day} {place} {weather}?",), ("¿{weather} {day} {place}?",), 1.2),
    (("It will {weather} {day} {place}.",), ("Es wird {day} {place} {weather}.",), ("{weather} {day} {place}.",), 1.2),
    (
        ("It is {degrees} degrees {place}.",),
        ("Es sind {degrees} Grad {place}.",),
        ("Hace {degrees} grados {place}.",),
        1.0,
    ),
    (("It is {state} {room}.",), ("Es ist {state} {room}.",), ("Hace {state} {room}.",), 1.0),
    (
        ("There are {count} {counted} {room}.",),
        ("Es gibt {count} {counted} {room}.",),
        ("Hay {count} {counted} {room}.",),
        1.2,
    ),
    (
        ("We need {count} {counted} {day}.",),
        ("Wir brauchen {day} {count} {counted}.",),
        ("Necesitamos {count} {counted} {day}.",),
        1.2,
    ),
    (
        ("Where is {thing}? It is {position} {furniture}.",),
        ("Wo ist {thing}? Es liegt {position} {furniture.dat}.",),
        ("¿Dónde está {thing}? Está {position} {furniture}.",),
        1.0,
    ),
    (
        ("{thing} is {position} {furniture}.",),
        ("{thing} liegt {position} {furniture.dat}.",),
        ("{thing} está {position} {furniture}.",),
        1.2,
    ),
    (
        ("{thing} {position} {furniture} is {colour}.",),
        ("{thing} {position} {furniture.dat} ist {colour}.",),
        ("{thing} {position} {furniture} es {colour}.",),
        1.2,
    ),
    (
        ("I cannot find {thing} {room}.",),
        ("Ich kann {thing.acc} {room} nicht finden.",),
        ("No encuentro {thing} {room}.",),
        1.0,
    ),
    (("{thing} costs {n} euros.",), ("{thing} kostet {n} Euro.",), ("{thing} cuesta {n} euros.",), 1.0),
    (
        ("What is {n} plus {m}?", "How much is {n} plus {m}?"),
        ("Was ist {n} plus {m}?", "Wie viel ist {n} plus {m}?"),
        ("¿Cuánto es {n} más {m}?", "¿Cuántos son {n} más {m}?"),
        1.0,
    ),
    (("What is {n} minus {m}?",), ("Was ist {n} minus {m}?",), ("¿Cuánto es {n} menos {m}?",), 0.8),
    (
        ("{vehicle} leaves {day} at {clock}.",),
        ("{vehicle} fährt {day} um {clock} ab.",),
        ("{vehicle} sale {day} a {clock}.",),
        1.0,
    ),
    (
        ("{vehicle} arrives {place} at {clock}.",),
        ("{vehicle} kommt um {clock} {place} an.",),
        ("{vehicle} llega a {clock} {place}.",),
        0.8,
    ),
    (
        ("{vehicle} is {minutes} minutes late.",),
        ("{vehicle} hat {minutes} Minuten Verspätung.",),
        ("{vehicle} tiene {minutes} minutos de retraso.",),
        0.8,
    ),
    (
        ("{meal} starts {day} at {clock}.",),
        ("{meal} beginnt {day} um {clock}.",),
        ("{meal} empieza {day} a {clock}.",),
        1.0,
    ),
    (("{food} {taste}.",), ("{food} {taste}.",), ("{food} {taste}.",), 1.2),
    (("{person} is waiting {room}.",), ("{person} wartet {room}.",), ("{person} espera {room}.",), 0.8),
    (
        ("{person} wants to {chore} {day}.",),
        ("{person} hat {day} vor, {chore}.",),
        ("{person} quiere {chore} {day}.",),
        0.8,
    ),
    (
        ("{person} is coming {day} at {clock}.",),
        ("{person} kommt {day} um {clock}.",),
        ("{person} viene {day} a {clock}.",),
        1.0,
    ),
    (("I have forgotten to {chore}.",), ("Ich habe vergessen, {chore}.",), ("He olvidado {chore}.",), 0.5),
    (("Good morning.",), ("Guten Morgen.",), ("Buenos días.",), 0.15),
    (("Good night.",), ("Gute Nacht.",), ("Buenas noches.",), 0.15),
    (("Thank you very much.",), ("Vielen Dank.",), ("Muchas gracias.",), 0.15),
    (("What time is it?",), ("Wie spät ist es?",), ("¿Qué hora es?",), 0.15),
    (("Stop the music.",), ("Stoppe die Musik.",), ("Para la música.",), 0.15),
    (("Everything is fine.",), ("Alles ist gut.",), ("Todo está bien.",), 0.15),
    (("See you tomorrow.",), ("Bis morgen.",), ("Hasta mañana.",), 0.15),
    (("I do not understand that.",), ("Das verstehe ich nicht.",), ("Eso no lo entiendo.",), 0.15),
)
FRAMES = tuple(Frame(*wordings, order=True) for wordings in _ORDERS) + tuple(
    Frame(en, de, es, weight=weight) for en, de, es, weight in _STATEMENTS
)

# Before and after an order, in the three languages.
MANNERS = (
    (("{}.",) * 3, 5.0),
    (("Please {}.", "Bitte {}.", "Por favor, {}."), 2.0),
    (("{}, please.", "{}, bitte.", "{}, por favor."), 1.0),
    (("Hello house, {}.", "Hallo Haus, {}.", "Hola casa, {}."), 1.0),
    (("Now {}.", "Jetzt aber: {}.", "Ahora {}."), 1.0),
)


def held_out(meaning: str, frame: Frame) -> bool:
    """Whether the meaning is kept out of training; frames with fewer than two slots all belong to training,
    but for the digits, of which there are enough."""
    rich = frame.en[0].count("{") >= 2 or "{digits}" in frame.en[0] or "{shopping}" in frame.en[0]
    share = int.from_bytes(hashlib.sha256(meaning.encode()).digest()[:4], "big") / 2**32
    return rich and share < HELD_OUT_SHARE


def _capital(text: str) -> str:
    """The text with its first letter upper-case, past an opening question mark."""
    start = 1 if text.startswith("¿") else 0
    return text[:start] + text[start : start + 1].upper() + text[start + 1 :]


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _spanish(text: str) -> str:
    """Contractions that the templates leave open: 'a el' is 'al', 'de el' is 'del'."""
    return f" {text}".replace(" a el ", " al ").replace(" de el ", " del ")[1:]


def sentence(rng: random.Random, language: str) -> Sentence:
    """A random sentence in `language`, in training or held out as its meaning says."""
    frame = rng.choices(FRAMES, [f.weight for f in FRAMES])[0]
    values = {
        name: slot(rng) if callable(slot) else rng.choice(slot)
        for name, slot in SLOTS.items()
        if "{" + name in frame.en[0]
    }
    wordings = {code: list(getattr(frame, code)) for code in LANGUAGES}
    chosen = rng.choice(wordings[language])
    manner = rng.choices([m for m, _ in MANNERS], [w for _, w in MANNERS])[0]

    def render(code: str, template: str) -> str:
        text = template.format(**{name: value[code] for name, value in values.items()})
        if frame.order:
            outer = manner[LANGUAGES.index(code)]
            text = outer.format(text if outer.startswith("{") else _lower(text))
        text = _spanish(text) if code == "es" else text
        return _capital(text)

    meaning = frame.en[0].format(**{name: value["en"] for name, value in values.items()})
    text = render(language, chosen)
    translation = text if language == "en" else render("en", frame.en[0])
    return Sentence(language, text, translation, meaning, held_out(meaning, frame))


def sentences(seed: int, language: str, count: int, held: bool) -> list[Sentence]:
    """`count` distinct sentences of one language, all of them held out of training or none."""
    rng, found = random.Random(f"{seed}-{language}-{held}"), {}
    while len(found) < count:
        made = sentence(rng, language)
        if made.held_out == held:
            found.setdefault(made.text, made)
    return list(found.values())


@cache
def corpus(seed: int = 0, count: int = 4000) -> tuple[str, ...]:
    """Training text of all languages, to learn the byte pairs of the tokenizer on."""
    return tuple(s.text for code in LANGUAGES for s in sentences(seed, code, count, held=False))
