"""The text of deepseek-v4-nano: the questions that it answers, and which answers are good enough.

    python scripts/nano_text.py ask runs/nano-prompts.jsonl
    dspark text default --prompts runs/nano-prompts.jsonl --out runs/nano-words \\
        --tokens 100000000 --temperatures 0,0.3 --max-tokens 160 --batch 96
    python scripts/nano_text.py keep runs/nano-words/text.jsonl OTHER.jsonl.gz --out TEXT.jsonl.gz

    python scripts/nano_text.py ask --short runs/nano-short.jsonl
    dspark text default --prompts runs/nano-short.jsonl --out runs/nano-sentences \\
        --tokens 100000000 --temperatures 0 --max-tokens 48 --batch 96
    python scripts/nano_text.py keep --short runs/nano-sentences/text.jsonl --out TEXT.jsonl.gz

Twelve million parameters and some hundred thousand tokens are enough for one manner of speaking,
not for a language. So the questions are plain and much alike, every template with every subject,
shuffled. Answers that repeat themselves or hold markup are dropped, as are long ones, those to long
questions and those at temperature 1; what was cut off ends with its last whole sentence.

`--short` asks for one sentence each. The request for brevity is not kept, so the model learns to be
brief unasked; some sentences on one subject, joined, answer questions that want more.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import zlib
from pathlib import Path
from typing import Any

from dspark.train.samples import read_rows

REPETITIVE = 2.2
"""How many times smaller an answer may become by zlib."""
LONGEST_QUESTION, LONGEST_ANSWER = 200, 1500
"""Characters."""
MARKUP = ("```", "**")

COUNTED = """
apple,baby,bakery,ball,bank,banana,basket,beach,bear,bed,bee,bell,bicycle,bird,boat,book,
bottle,box,boy,bridge,brother,bus,butterfly,cake,camel,camera,candle,car,carpenter,castle,cat,
chair,cheese,cherry,chicken,child,church,circle,city,clock,cloud,coat,computer,cook,country,
cow,crown,cup,dancer,desert,desk,dinner,doctor,dog,doll,dolphin,door,dragon,dream,dress,drum,
duck,eagle,egg,elephant,family,farm,farmer,feather,festival,field,fire,fish,flag,flower,forest,
fox,friend,frog,garden,gift,giraffe,girl,goat,grandmother,guitar,hammer,hat,hill,holiday,horse,
hospital,hotel,house,island,jacket,job,journey,kangaroo,key,king,kitchen,kite,knife,ladder,lake,
lamp,language,leaf,lemon,letter,library,lighthouse,lion,machine,map,market,meal,mirror,monkey,
mountain,mouse,museum,neighbour,nest,newspaper,night,nurse,ocean,office,orange,owl,painter,
painting,park,pencil,penguin,phone,piano,picture,pilot,pirate,plane,planet,plant,poem,pond,
potato,present,queen,rabbit,radio,rainbow,restaurant,ring,river,road,robot,rocket,roof,room,
rose,sailor,sandwich,school,sheep,ship,shirt,shoe,shop,sister,snake,song,spider,spoon,squirrel,
stamp,star,station,stone,storm,story,street,student,summer,table,teacher,telescope,theatre,
ticket,tiger,tomato,tool,tower,town,toy,train,tree,truck,turtle,umbrella,uncle,vegetable,
village,violin,volcano,wall,watch,whale,wheel,window,wolf,writer,zebra,zoo
"""
UNCOUNTED = """
air,art,beauty,bread,breakfast,butter,chess,chocolate,cleaning,climate,coffee,cooking,cotton,
courage,dancing,drawing,education,electricity,energy,exercise,football,freedom,friendship,fruit,
gardening,glass,gold,grass,gravity,happiness,health,history,homework,honesty,honey,hope,ice,
kindness,knowledge,laughter,learning,light,love,luck,magic,mathematics,meat,medicine,milk,money,
music,nature,oil,painting,paper,patience,peace,physics,play,poetry,rain,reading,recycling,rest,
rice,running,sadness,safety,salt,sand,school work,science,silence,silver,singing,sleep,snow,
soap,soup,space,sport,sugar,sunlight,swimming,tea,teamwork,technology,time,traffic,travel,
trust,walking,water,weather,wind,wood,wool,work,writing
"""
MORE_COUNTED = """
accident,actor,adult,airport,alarm,anchor,angel,animal,ant,apartment,aquarium,armchair,army,arrow,
artist,athlete,attic,aunt,author,badge,bag,baker,balcony,balloon,bandage,barber,barn,barrel,bath,
battery,bell tower,belt,bench,blanket,blender,boot,bowl,bracelet,brain,branch,brick,broom,brush,
bucket,builder,bull,button,cabin,cable,cactus,calendar,canal,candle holder,canoe,captain,carpet,
carrot,cave,chain,cheetah,chef,choir,cinema,clown,coach,coin,comb,comet,compass,concert,cookie,
corner,costume,cottage,cousin,crab,crane,crayon,cricket,crocodile,crow,cupboard,curtain,cushion,
daughter,dentist,diamond,diary,dictionary,donkey,doorbell,driver,drawer,ear,earthquake,engine,
engineer,envelope,eraser,eye,factory,fan,farmhouse,father,fence,ferry,finger,firefighter,fisherman,
flute,foot,fork,fountain,friendship bracelet,fridge,gardener,gate,ghost,glove,goose,grape,
grandfather,greenhouse,guest,gymnasium,hamster,hand,harbour,hat shop,hawk,heart,hedgehog,helicopter,
helmet,hen,hero,hive,hobby,hut,insect,iron,jar,jewel,judge,juggler,jungle,kettle,keyboard,king's
crown,kitten,lamb,lantern,lawyer,leader,leopard,lift,lizard,lock,magician,magnet,mailbox,mask,mat,
mayor,meadow,mechanic,medal,melon,mill,miner,moon,mosque,moth,mother,motorbike,movie,mushroom,
musician,necklace,needle,net,nose,notebook,number,nut,oak,octopus,olive,onion,orchard,orchestra,
oven,ox,oyster,paintbrush,palace,pan,panda,parachute,parade,parent,parrot,passenger,passport,path,
peach,peacock,pear,pebble,pen,pepper,pet,photograph,picnic,pie,pig,pigeon,pillow,pin,pine tree,pipe,
pizza,plate,playground,plum,pocket,poet,police officer,pony,postman,pot,priest,prince,princess,
prison,prize,puddle,pumpkin,puppet,puppy,purse,puzzle,pyramid,quilt,rat,raven,recipe,refrigerator,
relative,ribbon,rope,ruler,saddle,salad,salmon,scarf,scientist,seal,seed,shadow,shark,shelf,shell,
shepherd,shoulder,shovel,singer,sink,skeleton,sky,sledge,snail,snowman,soldier,son,soup bowl,spade,
sparrow,sponge,squid,stadium,stair,statue,stool,stove,strawberry,stream,submarine,suitcase,sun,
surgeon,swan,sweater,swimmer,swing,sword,tailor,tank,taxi,teapot,temple,tent,thief,thread,throne,
thumb,tie,toad,toaster,tooth,torch,towel,tractor,traveller,treasure,truck driver,trumpet,tunnel,
twin,tyre,valley,van,vase,vet,visitor,wagon,waiter,waterfall,wave,wedding,well,whistle,witch,wizard,
woman,worker,workshop,worm,wound,yard,yacht
"""
MORE_UNCOUNTED = """
advice,anger,applause,archery,baseball,basketball,biology,boredom,business,camping,chemistry,
clay,coal,comfort,communication,confidence,copper,cycling,darkness,dust,economics,faith,fame,fashion,
fear,fishing,flour,fog,fun,furniture,geography,grammar,gratitude,guilt,hair,hockey,hunger,imagination,
information,iron,jam,jealousy,jewellery,joy,juice,justice,knitting,lightning,literature,loneliness,
luggage,marriage,moonlight,mud,news,noise,pasta,pepper,philosophy,photography,plastic,poverty,pride,
progress,research,respect,sailing,seafood,shopping,skiing,smoke,steel,sewing,tennis,thunder,
truth,vinegar,violence,wealth,wisdom,yoghurt,youth
"""
SHORT = (
    "What is {a}?",
    "Why is {a} important?",
    "What do people like about {a}?",
    "How can {a} help me?",
    "Describe {a} in simple words.",
    "What makes {a} special?",
    "Write a simple sentence about {a}.",
    "What can I learn from {a}?",
    "What is the difference between {a} and {b}?",
)
BRIEFLY = " Answer in one short sentence."
LONG = (
    "Tell me about {a}.",
    "Explain to a child what {a} is.",
    "Say something about {a}.",
    "Write a short text about {a}.",
    "What do you know about {a}?",
)
SENTENCES = 3
LONGEST_SENTENCE = 240
"""Characters."""
UNWANTED = re.compile(r"\n|\"|\bAI\b|\bI'?m?\b|\d|[.!?] ")
TEMPLATES = (
    "What is {a}?",
    "Tell me about {a}.",
    "Describe {a} in simple words.",
    "Explain to a child what {a} is.",
    "Why is {a} important?",
    "How can {a} help me?",
    "What should I think about before I choose {a}?",
    "What makes {a} special?",
    "Tell me a short story about {a}.",
    "Tell me a short story about {a} and {b}.",
    "What is the difference between {a} and {b}?",
    "Which is better, {a} or {b}?",
    "What do people like about {a}?",
    "What would you say to a friend who is afraid of {a}?",
    "Write the opening paragraph of a story about {a}.",
    "Describe a morning with {a}, with its sounds and smells.",
    "What can I learn from {a}?",
    "How did {a} change how people live?",
    "Suggest a plan for a quiet day with {a}.",
    "Write a friendly note about {a}.",
)


def subjects(more: bool = False) -> list[str]:
    words = _words(COUNTED) + (_words(MORE_COUNTED) if more else [])
    counted = [f"an {w}" if w[0] in "aeiou" else f"a {w}" for w in words]
    return counted + _words(UNCOUNTED) + (_words(MORE_UNCOUNTED) if more else [])


def _words(lines: str) -> list[str]:
    return lines.strip().replace(",\n", ",").replace("\n", " ").split(",")


def prompts(count: int, seed: int, short: bool = False) -> list[str]:
    draw = random.Random(seed)
    known = subjects(short)
    every = [(t, s) for t in (SHORT if short else TEMPLATES) for s in known]
    draw.shuffle(every)
    found = []
    for template, subject in every[:count]:
        other = draw.choice([s for s in known if s != subject])
        found.append(template.format(a=subject, b=other) + (BRIEFLY if short else ""))
    return found


def whole(row: dict[str, Any]) -> str | None:
    """The answer to its last whole sentence; None if the row is no good."""
    answer = row["answer"]
    if row["temperature"] >= 1 or len(row["prompt"]) >= LONGEST_QUESTION:
        return None
    if row["finish_reason"] != "stop":
        ends = [m.end() for m in re.finditer(r"[.!?](?=\s)", answer)]
        answer = answer[: ends[-1]] if ends else ""
    raw = answer.encode()
    repetitive = len(raw) > REPETITIVE * len(zlib.compress(raw, 9))
    plain = 0 < len(answer) < LONGEST_ANSWER and not any(m in answer for m in MARKUP)
    return answer if plain and not repetitive else None


def sentences(rows: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Rows of single sentences, and after them rows that join some on the same subject."""
    draw = random.Random(seed)
    kept = []
    about: dict[str, list[str]] = {}
    asked = {t.format(a=s, b=""): s for t in SHORT if "{b}" not in t for s in subjects(True)}
    for row in rows:
        question, answer = row["prompt"].removesuffix(BRIEFLY), row["answer"]
        good = row["finish_reason"] == "stop" and len(answer) <= LONGEST_SENTENCE
        if not good or not answer.endswith(".") or UNWANTED.search(answer):
            continue
        kept.append({"prompt": question, "answer": answer})
        if question in asked:
            about.setdefault(asked[question], []).append(answer)
    for subject, answers in about.items():
        different = sorted(set(answers))
        for template in draw.sample(LONG, 2) if len(different) >= SENTENCES else ():
            text = " ".join(draw.sample(different, SENTENCES))
            kept.append({"prompt": template.format(a=subject), "answer": text})
    draw.shuffle(kept)
    return [{**row, "temperature": 0.0, "finish_reason": "stop"} for row in kept]


def keep(files: list[Path], out: Path, short: bool, seed: int) -> str:
    rows = list(read_rows([str(f) for f in files]))
    if short:
        kept = sentences(rows, seed)
    else:
        kept = [{"prompt": r["prompt"], "answer": a, "temperature": r["temperature"],
                 "finish_reason": "stop"} for r in rows if (a := whole(r))]  # fmt: skip
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept)
    part = out.with_name(f".{out.name}.part")
    part.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    part.replace(out)
    return f"{out}: {len(kept)} rows of {len(rows)}"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = p.add_subparsers(dest="verb", required=True)
    asks = verbs.add_parser("ask", help="write the questions")
    asks.add_argument("out", type=Path)
    asks.add_argument("--count", type=int, default=10**6, help="at most templates times subjects")
    keeps = verbs.add_parser("keep", help="keep the good answers")
    keeps.add_argument("files", type=Path, nargs="+")
    keeps.add_argument("--out", type=Path, required=True)
    for verb in (asks, keeps):
        verb.add_argument("--short", action="store_true", help="answers of one sentence each")
        verb.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    if a.verb == "keep":
        print(keep(a.files, a.out, a.short, a.seed))
        return
    rows = "".join(json.dumps({"prompt": t}) + "\n" for t in prompts(a.count, a.seed, a.short))
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(rows, encoding="utf-8")
    print(f"{a.out}: {rows.count(chr(10))} prompts")


if __name__ == "__main__":
    main()
