"""A registered version in words, from its tags: what it came from, what the gate said, where it is now."""

from collections.abc import Mapping


def describe(tags: Mapping[str, str]) -> str:
    """Markdown, a paragraph for each thing that is known. Pure, so writing it twice changes nothing."""
    found = [_origin(tags)]
    if "verdict" in tags:
        against = f" against `{tags['verdict_against']}`" if "verdict_against" in tags else ""
        reasons = f": {tags['verdict_reasons']}" if tags.get("verdict_reasons") else ""
        found.append(f"**{tags['verdict'].capitalize()}**{against}{reasons}.")
    if "served_at" in tags:
        word = "Served since" if tags.get("state") == "served" else "Was served from"
        found.append(f"{word} {tags['served_at']}, by {tags['served_by']}: {tags['served_reason']}.")
    if "replaced_at" in tags:
        found.append(f"Replaced by `{tags['replaced_by']}` at {tags['replaced_at']}.")
    if "rolled_back_at" in tags:
        by = tags["rolled_back_by"]
        found.append(f"**Taken back** at {tags['rolled_back_at']}, by {by}: {tags['rolled_back_reason']}.")
    return "\n\n".join(found)


def _origin(tags: Mapping[str, str]) -> str:
    if "window" not in tags:
        return f"Draft `{tags['digest']}` of {tags['deployment']}, served before it was registered."
    parent = f"`{tags['parent']}`" if "parent" in tags else "its champion"
    if "parent_version" in tags:
        parent += f" (version {tags['parent_version']})"
    size = f": {tags['samples']} samples, {tags['tokens']} tokens" if "samples" in tags else ""
    data = f", dataset version {tags['lance_version']}" if "lance_version" in tags else ""
    return f"Draft `{tags['digest']}`: {parent} fine-tuned on window {tags['window']}{size}{data}."
