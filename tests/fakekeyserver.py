"""A Redis that keeps keys in this process: what the scripts of `access.keyscripts` do, in Python."""

from __future__ import annotations

from gateway.access import keyscripts as scripts
from gateway.store.scripts import SCAN
from gateway.store.shared import StoreUnavailable


class FakeKeyServer:
    """See `store.scripts.Scripted`. `asked` are the scripts in order; while `down`, it does not answer."""

    def __init__(self):
        self.asked = []
        self.down = False
        self.trouble = ""
        self.forget()

    def forget(self):
        """Lose everything."""
        self.records, self.changed, self.history, self.used = {}, {}, [], {}
        self.generation, self.pepper = 0, ""

    def snapshot(self):
        """Return what `restore` goes back to."""
        return (dict(self.records), dict(self.changed), [*self.history], self.generation)

    def restore(self, before):
        """Lose what happened since a snapshot."""
        records, changed, history, self.generation = before
        self.records, self.changed, self.history = dict(records), dict(changed), [*history]

    async def ask(self, script, keys, args, within_s=0.2, late=None):
        self.asked.append(script)
        if self.down:
            raise StoreUnavailable("the connection was refused")
        return {
            scripts.PUT: self._put,
            scripts.READ: self._read,
            scripts.GET: (self.used if keys == [scripts.USED] else self.records).get,
            scripts.NOTE_USE: self._note_use,
            SCAN: self._uses,
        }[script](*args)

    def _put(self, key_id, version, text, stamp, pepper, channel, kept):
        if self.pepper not in ("", pepper):
            return ["pepper"]
        now = self.records.get(key_id, "")
        if now.partition(" ")[0] != version:
            return ["changed", now]
        self.pepper, self.records[key_id] = pepper, text
        self.generation += 1
        self.changed[key_id] = self.generation
        self.history = [stamp, *self.history][:kept]
        return ["kept"]

    def _read(self, known, stamp, most):
        now, what = self.generation, "since"
        at = now - known
        there = 0 <= at < len(self.history) and self.history[at]
        if stamp and (there != stamp or len(self.records) < len(self.changed)):
            known, what = 0, "all"
        elif known == now:
            what = "same"
        elif known > now:
            known, what = 0, "all"
        since = sorted((at, each) for each, at in self.changed.items() if at > known)[:most]
        upto = since[-1][0] if len(since) == most else now
        head = [what, now, self.history[0] if self.history else "", self.pepper, upto]
        found = ((each, self.records[each]) for _, each in since if each in self.records)
        return [*head, *(word for pair in found for word in pair)]

    def _note_use(self, latest, *args):
        for key_id, at in zip(args[::2], args[1::2], strict=True):
            before = int(self.used.get(key_id, 0))
            self.used[key_id] = str(at if before > latest else max(at, before))
        return 1

    def _uses(self, at):
        ends = int(at) + 500
        part = [word for pair in [*self.used.items()][int(at) : ends] for word in pair]
        return [str(ends) if ends < len(self.used) else "0", part]
