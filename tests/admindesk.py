"""The admin app over a small fleet, for tests that ask it."""

import itertools
import json

from starlette.testclient import TestClient

from gateway.access.filestore import FileKeys
from gateway.access.keys import KeyRing, OpenRing
from gateway.admin.api import admin_app
from gateway.admin.audit import Audit
from gateway.admin.desk import Desk as Objects
from gateway.admission.gate import Gate
from gateway.config.load import Loaded, load_config
from gateway.config.models import Config
from gateway.config.reload import diff, digest
from gateway.core.errors import ConfigError
from gateway.ingress.early import Early
from gateway.ingress.routes import Readiness
from gateway.launch.disk import DiskSpace
from gateway.observe.ended import EndedRequests
from gateway.observe.metrics import Metrics
from gateway.observe.readings import Readings
from gateway.observe.series import Series
from gateway.ops.dryrun import Deciding
from gateway.ops.reloads import History
from gateway.ops.requests import Requests
from gateway.ops.upgrading import Upgrades
from gateway.pools.quarantine import Quarantine
from gateway.pools.table import PoolTable
from gateway.routing.catalog import Catalogs
from gateway.routing.choice import Chooser
from gateway.usage.accounts import Accounts
from tests.orderdesk import adapters, alone, no_limits, orders

TOKEN = "admin-token-of-the-tests"


class HeldClock:
    def __init__(self):
        self.wall_now = 1_700_000_000.0

    def now(self):
        return 100.0

    def wall(self):
        return self.wall_now


class Desk:
    """The admin app over an empty fleet; what it depends on may be changed under way."""

    def __init__(self, state, pools=None, limits=None, keys=False, more=None, **admin):
        self.file = state / "gateway.yaml"
        self.state, self.pools, self.limits = state, pools or {"m": 1}, limits or {}
        self.more = more or {}
        self.configure(**admin)
        self.started, self.keys_trouble = self.loaded.config, ""
        self.readiness = Readiness(True, (("accepting", True, "ok"), ("backends", True, "1 of 1")))
        clock = self.clock = HeldClock()
        self.history = History(state, clock)
        self._ring = None
        self.store = FileKeys(state / "keys.yaml", self.tiers, clock.wall) if keys else None
        table = PoolTable(clock)
        table.apply(self.loaded.config.pools)
        self.metrics = Metrics(Readings(), clock)
        self.orders = orders(table, clock, self.loaded.config)
        self.table, self.gate = table, Gate(table, Chooser(table), clock)
        self.gate.configure(self.loaded.config.pools, {0})
        self.objects = Objects(
            table=table,
            metrics=self.metrics,
            clock=clock,
            loaded=lambda: self.loaded,
            ready=lambda: self.readiness,
            deciding=Deciding(self.gate, Catalogs(table, clock), self.ring, no_limits),
            early=Early(lambda record: None, clock),
            requests=Requests(EndedRequests(), lambda: ()),
            upgrades=Upgrades(),
            trial=lambda pool: None,
            replicas=alone(clock),
            orders=self.orders,
            adapters=adapters(table, clock, self.loaded.config, self.orders),
            quarantine=Quarantine(table, clock),
            reloading=self,
            audit=Audit(state),
            keys=lambda: self.store,
            file=self.file,
            accounts=Accounts(self.clock, None, None, 0),
            series=Series(self.metrics, clock),
            disk=DiskSpace(state),
        )
        self.app = admin_app(self.objects)
        self.client = TestClient(self.app, base_url="http://127.0.0.1:9090")

    def configure(self, **admin):
        ports = itertools.count(8001)
        pools = {
            name: {"backends": [f"http://127.0.0.1:{next(ports)}" for _ in range(count)]}
            for name, count in self.pools.items()
        }
        settings = {
            "pools": pools,
            "admin": admin,
            "limits": self.limits,
            "state": str(self.state),
            **self.more,
        }
        self.file.write_text(json.dumps(settings))
        self.loaded = Loaded(Config.model_validate(settings))

    def ring(self):
        """The keys as a gateway knows them."""
        if self.store is None:
            return OpenRing()
        if self._ring is None or self._ring.changed():
            self._ring = KeyRing.load(self.store.path, self.tiers())
        return self._ring

    def tiers(self):
        return self.loaded.config.tiers

    async def reload(self, by, reason):
        """Put the file in force, as a process does."""
        try:
            loaded = load_config(self.file)
        except ConfigError as error:
            in_force = digest(self.loaded.config)
            return self.history.note(by, in_force, reason=reason, findings=error.findings)
        effect = diff(self.loaded.config, loaded.config, started=self.started)
        self.loaded = loaded
        return self.history.note(by, digest(loaded.config), reason=reason, effect=effect)

    def get(self, path, host=None, **headers):
        if host is not None:
            headers["host"] = host
        return self.client.get(path, headers=headers)
