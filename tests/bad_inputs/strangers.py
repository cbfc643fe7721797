"""Files of strangers: models, texts, chats, prompts and templates; and a strange surrounding."""

from __future__ import annotations

from bad_inputs.case import (
    NESTED,
    BadInput,
    all_of,
    cut,
    edit,
    folder_at,
    link_at,
    remove,
    write,
    write_over,
)

ASK = "generate --target target --prompt 'a b'"
SETTINGS, WEIGHTS = "target/config.json", "target/model.safetensors"
TOKENIZER, ITS_SETTINGS = "target/tokenizer.json", "target/tokenizer_config.json"

TARGETS = [
    ("no settings", remove(SETTINGS), "target", "config.json"),
    ("empty settings", write(SETTINGS, ""), "config.json", "JSON"),
    ("settings cut short", cut(SETTINGS, 100), "config.json", "JSON"),
    ("settings that are a list", write(SETTINGS, "[]"), "config.json", "save it again"),
    ("settings without anything", write(SETTINGS, "{}"), "target", "model_type"),
    ("settings that are a folder", folder_at(SETTINGS), "target", "save it again"),
    ("settings that are deep", write(SETTINGS, NESTED), "target", "JSON"),
    ("settings in UTF-16", write(SETTINGS, "{}".encode("utf-16")), "config.json", "JSON"),
    ("an unknown family", edit(SETTINGS, "model_type", "lama"), "target", "newer one"),
    ("a family that is a number", edit(SETTINGS, "model_type", 3), "target", "model"),
    ("a model without an LM head", edit(SETTINGS, "model_type", "bert"), "target", "LM head"),
    ("a recurrent family", edit(SETTINGS, "model_type", "mamba"), "target", "choose"),
    ("no layers", edit(SETTINGS, "num_hidden_layers", 0), "target", "choose a target"),
    ("layers that are text", edit(SETTINGS, "num_hidden_layers", "a"), "target", "layers"),
    ("ten million layers", edit(SETTINGS, "num_hidden_layers", 10**7), "target", "layers"),
    ("another width", edit(SETTINGS, "hidden_size", 64), "target", "again"),
    ("a negative width", edit(SETTINGS, "hidden_size", -32), "target", "negative"),
    ("heads that do not divide", edit(SETTINGS, "num_attention_heads", 5), "target", "heads"),
    ("a small vocabulary", edit(SETTINGS, "vocab_size", 10), "target", "again"),
    ("another activation", edit(SETTINGS, "hidden_act", "magic"), "target", "magic"),
    ("no weights", remove(WEIGHTS), "target", "save_pretrained"),
    ("empty weights", write(WEIGHTS, b""), WEIGHTS, "again"),
    ("weights cut short", cut(WEIGHTS, 1000), WEIGHTS, "again"),
    ("weights cut short by a byte", cut(WEIGHTS, -1), WEIGHTS, "again"),
    ("weights that are text", write(WEIGHTS, "<html>" * 100), WEIGHTS, "again"),
    ("a pointer of Git LFS", write(WEIGHTS, "version https://git-lfs"), WEIGHTS, "again"),
    ("weights that are a folder", folder_at(WEIGHTS), WEIGHTS, "again"),
    ("weights that lead to nothing", link_at(WEIGHTS, "nowhere"), "target", "safetensors"),
    (
        "pickled weights",
        all_of(remove(WEIGHTS), write("target/pytorch_model.bin", b"\x80\x04.")),
        "target",
        "pickled ones are not read",
    ),
    (
        "an index that is no JSON",
        all_of(remove(WEIGHTS), write(f"{WEIGHTS}.index.json", "{")),
        "model.safetensors.index.json",
        "again",
    ),
    (
        "an index of numbers",
        all_of(remove(WEIGHTS), write(f"{WEIGHTS}.index.json", {"weight_map": {"a": 3}})),
        "model.safetensors.index.json",
        "again",
    ),
    (
        "an index that climbs",
        all_of(remove(WEIGHTS), write(f"{WEIGHTS}.index.json", {"weight_map": {"a": "../x"}})),
        "target",
        "again",
    ),
    ("no tokenizer", remove(TOKENIZER, ITS_SETTINGS), "target", "tokenizer"),
    ("an empty tokenizer", write(TOKENIZER, ""), "target", "tokenizer"),
    ("a tokenizer cut short", cut(TOKENIZER, 500), "target", "tokenizer"),
    ("a tokenizer that is a list", write(TOKENIZER, "[]"), "target", "tokenizer"),
    ("a tokenizer that is a folder", folder_at(TOKENIZER), "target", "tokenizer"),
    ("a target that is a file", write_over("target"), "target", "folder"),
    (
        "a target that is empty",
        all_of(remove("target"), folder_at("target")),
        "target",
        "config.json",
    ),
    (
        "a target that leads to itself",
        link_at("target", "target"),
        "target",
        "no folder of that name",
    ),
]
"""What is wrong with a model's folder; the place and a part of the advice."""

VIEW = "view-data bad.jsonl target.name=target"

CHATS = [
    ("an empty file", "", "bad.jsonl", "text"),
    ("a blank file", "\n \n", "bad.jsonl", "text"),
    ("no JSON", "hello\n", "bad.jsonl:1", "mend the line"),
    ("a line cut short", '{"text": "a"}\n{"text": "b\n', "bad.jsonl:2", "mend the line"),
    ("a list", "[1, 2]\n", "bad.jsonl:1", "mend the line"),
    ("a number", "3\n", "bad.jsonl:1", "mend the line"),
    ("null", "null\n", "bad.jsonl:1", "mend the line"),
    ("no text", '{"prompt": "a"}\n', "bad.jsonl:1", "mend the line"),
    ("a text that is a number", '{"text": 3}\n', "bad.jsonl:1", "mend the line"),
    ("messages that are text", '{"messages": "a"}\n', "bad.jsonl:1", "mend the line"),
    ("no messages", '{"messages": []}\n', "bad.jsonl:1", "mend the line"),
    ("messages of numbers", '{"messages": [1, 2]}\n', "bad.jsonl:1", "mend the line"),
    ("a message without a role", '{"messages": [{"content": "a"}]}\n', "bad.jsonl:1", "mend"),
    ("an unknown role", '{"messages": [{"role": "x", "content": "a"}]}\n', "bad.jsonl:1", "mend"),
    ("another encoding", '{"text": "café"}\n'.encode("latin-1"), "bad.jsonl:1", "UTF-8"),
    ("UTF-16", '{"text": "a"}\n'.encode("utf-16"), "bad.jsonl:1", "UTF-8"),
    ("half a character", '{"text": "a\\ud83d"}\n', "bad.jsonl:1", "half a character"),
    ("a depth of 100,000", '{"text": ' + NESTED + "}\n", "bad.jsonl:1", "mend"),
    ("two documents", '{"text": "a"}\n{"text": "b"}\n', "bad.jsonl", "at least 3"),
    ("NaN", '{"text": NaN}\n', "bad.jsonl:1", "mend the line"),
    ("an integer of 5,000 digits", '{"text": ' + "9" * 5000 + "}\n", "bad.jsonl:1", "mend"),
]
"""What is in a JSONL of texts or chats."""

MEASURE = "evaluate runs/tiny evaluation.prompts.name=bad.jsonl"

PROMPTS = [
    ("an empty file", "", "bad.jsonl", "prompt"),
    ("no JSON", "hello\n", "bad.jsonl:1", "mend the line"),
    ("a list", "[]\n", "bad.jsonl:1", "mend the line"),
    ("no id", '{"turns": ["a"]}\n', "bad.jsonl:1", "mend the line"),
    ("no turns", '{"question_id": 1}\n', "bad.jsonl:1", "mend the line"),
    ("empty turns", '{"question_id": 1, "turns": []}\n', "bad.jsonl:1", "mend the line"),
    ("turns that are text", '{"question_id": 1, "turns": "a"}\n', "bad.jsonl:1", "mend the line"),
    ("a turn that is blank", '{"question_id": 1, "turns": [" "]}\n', "bad.jsonl:1", "mend the"),
    ("a turn that is a number", '{"question_id": 1, "turns": [3]}\n', "bad.jsonl:1", "mend the"),
    ("an id that is a list", '{"question_id": [], "turns": ["a"]}\n', "bad.jsonl:1", "mend the"),
    (
        "half a character",
        '{"question_id": 1, "turns": ["\\ud83d"]}\n',
        "bad.jsonl:1",
        "half a character",
    ),
    ("another encoding", b'{"question_id": "\xe9"}\n', "bad.jsonl:1", "UTF-8"),
    ("a prompt of 300 tokens", {"question_id": 7, "turns": ["a b " * 150]}, "7", "shorten"),
]
"""What is in a JSONL of prompts; the limit of 1 reads the first alone where that is whole."""

OF_CHATS = "view-data chats.jsonl target.name=target"

TEMPLATES = [
    ("no template", "", "plain", ""),
    ("a missing template", "nowhere.jinja", "plain", ""),
    ("a folder as template", "corpus", "plain", ""),
    ("a template without an end", "bad.jinja", "for", "{% for message in messages %}"),
    ("a template with an unknown tag", "bad.jinja", "frobnicate", "{% frobnicate %}"),
    ("a template in another encoding", "bad.jinja", "UTF-8", b"\xff\xfe{{ messages }}"),
    ("a template that refuses", "bad.jinja", "no system", "{{ raise_exception('no system') }}"),
    ("a template of an unknown name", "bad.jinja", "'nothing'", "{{ nothing.at.all }}"),
    ("a template that is Python", "bad.jinja", "unsafe", "{{ ''.__class__.__mro__ }}"),
    ("a template that divides by zero", "bad.jinja", "zero", "{{ 1 / 0 }}"),
    ("a template that includes a file", "bad.jinja", "loader", "{% include '/etc/passwd' %}"),
]
"""What is wrong with a template, its name, a part of the advice, and what is in it."""

SURROUNDINGS = [
    (
        "a cache that is a file",
        "generate --prompt a",
        "x.yaml",
        "FALCON_LAB_CACHE",
        {"FALCON_LAB_CACHE": "x.yaml"},
    ),
    (
        "a cache of a long name",
        "generate --prompt a",
        "xxx",
        "FALCON_LAB_CACHE",
        {"FALCON_LAB_CACHE": "x" * 300},
    ),
    (
        "a cache below a file",
        "generate --prompt a",
        "x.yaml",
        "FALCON_LAB_CACHE",
        {"FALCON_LAB_CACHE": "x.yaml/a"},
    ),
    (
        "a wandb mode that there is not",
        "run x.yaml out=runs/fresh",
        "WANDB_MODE",
        "offline",
        {"WANDB_MODE": "on"},
    ),
    ("a rank that is a word", "run x.yaml out=runs/fresh", "RANK", "number", {"RANK": "first"}),
    (
        "a local rank that is a word",
        "run x.yaml out=runs/fresh",
        "LOCAL_RANK",
        "number",
        {"LOCAL_RANK": "a"},
    ),
    ("a world of no size", "compare heads.yaml", "WORLD_SIZE", "number", {"WORLD_SIZE": "a"}),
]

TYPED = [
    ("a prompt that is empty", "generate --target target", "prompt", "give --prompt TEXT", ""),
    ("a prompt that is blank", "generate --target target", "prompt", "give --prompt TEXT", " \n"),
    ("a prompt that is no text", "generate --target target", "standard input", "UTF-8", b"caf\xe9"),
    (
        "a prompt in UTF-16",
        "generate --target target",
        "standard input",
        "UTF-8",
        "hello".encode("utf-16"),
    ),
    ("half a character", "generate --target target --prompt caf\udce9", "--prompt", "UTF-8", ""),
    ("a prompt of 300 tokens", "generate --target target", "600 tokens", "shorten", "a b " * 150),
]

CASES = [
    *(
        BadInput(f"a target: {what}", ASK, place, advice, change)
        for what, change, place, advice in TARGETS
    ),
    *(
        BadInput(f"a corpus: {what}", VIEW, place, advice, write("bad.jsonl", content))
        for what, content, place, advice in CHATS
    ),
    *(
        BadInput(f"prompts: {what}", MEASURE, place, advice, write("bad.jsonl", content))
        for what, content, place, advice in PROMPTS
    ),
    *(
        BadInput(
            what,
            f"{OF_CHATS} data.chat_template={name or 'null'}",
            "data.chat_template",
            advice,
            write("bad.jinja", content),
        )
        for what, name, advice, content in TEMPLATES
    ),
    *(
        BadInput(what, words, place, advice, environment=variables)
        for what, words, place, advice, variables in SURROUNDINGS
    ),
    *(
        BadInput(f"typed: {what}", words, place, advice, typed=text)
        for what, words, place, advice, text in TYPED
    ),
]
