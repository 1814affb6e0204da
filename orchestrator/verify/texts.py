"""Texts of the built-in cases: several scripts, emoji, code, and a passage to cut long prompts from."""

from __future__ import annotations

SCRIPTS = {
    "cyrillic": "Ночью пошёл снег, и к утру весь двор стал белым. Дети вышли с санками и",
    "greek": "Το καράβι έφυγε από το λιμάνι πριν χαράξει, και οι ψαράδες",
    "arabic": "في صباح يوم الجمعة فتح البائع دكانه الصغير ثم وضع التفاح",
    "hebrew": "הגשם הפסיק לפני הצהריים, והילדים יצאו אל החצר כדי",
    "devanagari": "नदी के किनारे एक पुराना पेड़ था, और उसकी छाया में गाँव के लोग",
    "thai": "ตลาดเช้าเปิดก่อนพระอาทิตย์ขึ้น แม่ค้าวางผักสดและผลไม้",
    "chinese": "山脚下有一座小图书馆,每天傍晚都会有人来借书。今天来的是",
    "japanese": "駅前のパン屋は朝六時に開きます。焼きたての匂いがすると、",
    "korean": "할머니는 아침마다 마당을 쓸고 나서 따뜻한 보리차를",
}

EMOJI = "Pick a picture for each day: 🌧️ Monday, 👩🏽‍🚀 Tuesday, 👨‍👩‍👧‍👦 Wednesday, 🏳️‍🌈 Thursday, 🇬🇷"

MIXED_SCRIPTS = "Σ(x) = привет + 世界 + नमस्ते + مرحبا; naïve café, “quotes”, 3½ €/kg →"

CODE = '''\
def median(values: list[float]) -> float:
    """The middle value; the mean of the two middle ones for an even count."""
    ordered = sorted(values)
    half, odd = divmod(len(ordered), 2)
    if odd:
'''

JSON_TEXT = '{"station": "North pier", "readings": [{"hour": 6, "wind_kn": 12.5}, {"hour": 7, "wind_kn":'

WHITESPACE = "  first\n\n\n\tsecond\t\tthird   \n    fourth\n"

STORY = "The lighthouse keeper counted the ships every evening. One evening there was one ship too many, and"

LIST = "A recipe for flat bread.\n1. Mix the flour with warm water.\n2. Knead it for ten minutes.\n3."

REPETITIVE = "red green red green red green red green red green"

PASSAGE = """\
The valley had two roads. The old one followed the river and was flooded every spring; the new one ran
along the slope, where the rock was sound, and had taken eleven years to build. People still used both.
The carrier who brought the mail preferred the old road because his horse knew it, and because the miller
at the second bridge gave him coffee. The doctor took the new road, for she was always in a hurry. In a
dry August the two could see each other across the fields, one in the dust below and one in the sun above,
and they would wave. Nobody in the valley owned a map. When a stranger asked for the way, he was told to
count the bridges, not the miles: three bridges to the school, five to the chapel, and after the seventh
there was nothing more to count. The children learned it as a rhyme. Years later, when the seventh bridge
was carried off by ice and built again as the sixth and the eighth, the rhyme was not changed, and strangers
had to be told that one of the bridges was a memory. """
