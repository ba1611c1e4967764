"""Texts for which tokenizers give different ids, and the special tokens of the tests' vocabularies."""

SPECIAL = ("<|begin|>", "<|im_end|>")
"""Control tokens of the tests' vocabularies."""

ADDED = ("<tool>", "    ")
"""User-defined tokens of the tests' vocabularies."""

TEXTS = [
    "",
    " ",
    "  ",
    "   three",
    "a",
    " a",
    "Hello, world!",
    "Hello  world",
    " leading and trailing ",
    "tabs\tand\t\ttabs",
    "line\nline\n\nline\r\nline\n\n\n",
    "  \n  \n x",
    "naïve café, déjà vu, Ångström, œuvre",
    "e\u0301 as two characters, and é as one",
    "ﬁ ligature, ① circled, ² raised, Ⅷ",
    "Straße, İstanbul, ĲSSELMEER",
    "Ελληνικά και Кириллица",
    "שלום עולם, مرحبا بالعالم",
    "हिन्दी में एक वाक्य",
    "สวัสดีชาวโลก",
    "中文没有空格，标点也不同。",
    "日本語のテキストとカタカナ",
    "한국어 문장입니다",
    "我想在apple工作1314151天～",
    "emoji 🎉 and 👩‍👩‍👧 family, flag 🇩🇪, thumb 👍🏽",
    "😶‍🌫️ joined",
    "3 33 333 3333 33333 333333",
    "3.14159, 1,000,000 and 1e-5",
    "²³¼ and ٣٤٥ and १२३",
    "it's I'll you're they've we'd I'm",
    "IT'S I'LL YOU'RE THEY'VE WE'D I'M",
    "''''''```````\"\"\"\"......!!!!!!??????",
    "------======= ##### ///// \\\\",
    "def f(x):\n    return x ** 2  # squared\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    "\tif x:\n\t\treturn {'a': [1, 2, 3]}",
    "<html><body class=\"x\">&nbsp;</body></html>",
    "https://example.org/path?query=1&b=%20#fragment",
    "user@example.org, C:\\Windows\\System32",
    "snake_case camelCase PascalCase kebab-case SCREAMING",
    "The quick brown fox jumps over the lazy dog.",
    "supercalifragilisticexpialidocious",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<|begin|>hello<|im_end|>",
    "<|begin|> hello <|im_end|>\n",
    "text<|im_end|><|im_end|>text",
    "a <tool> b<tool>c",
    "<|im_end", "<0x41> is no byte", "\u0000\u0001\u007f control",
    "zero\u200bwidth, no\u00a0break, \u3000wide",
    "▁lower one eighth block▁▁",
    "ends with spaces    ",
]  # fmt: skip

CORPUS = [text for text in TEXTS if not text.startswith("<|")] * 4
"""The texts on which small tokenizers are trained."""
