"""Rows, files and tokenizers that the data tests share."""

import json

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem


def row(index=0, **columns):
    return {
        "data_source": "streamrl/tiny_add",
        "prompt": [{"role": "user", "content": f"{index}+1="}],
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {"index": index},
        **columns,
    }


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return str(path)


def write_tools(path, *schemas):
    path.write_text(json.dumps({"tools": [{"class_name": "a.Tool", "config": {"type": "native"}, "tool_schema": schema} for schema in schemas]}))
    return str(path)


def schema(name, **properties):
    types = {key: {"type": value} for key, value in properties.items()}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object", "properties": types}}}


class CountingTokenizer:
    """As many tokens as the text has characters, 10 per tool and one for the generation prompt."""

    def apply_chat_template(self, conversation, *, tools=None, add_generation_prompt=False, **kwargs):
        return [1] * (sum(len(message["content"]) for message in conversation) + 10 * len(tools or []) + add_generation_prompt)


class FolderRemote(DirFileSystem):
    """A remote file system ``folder://`` over the local folder FolderRemote.root; counts what it hands out."""

    protocol = "folder"
    cachable = False
    root = ""
    fetched = 0

    def __init__(self, **_):
        super().__init__(path=self.root, fs=LocalFileSystem())

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("folder://")

    def get_file(self, rpath, lpath, **kwargs):
        type(self).fetched += 1
        return super().get_file(rpath, lpath, **kwargs)
