"""Many machines by Ray: actors that hold the kernel on their GPU, tasks that may be done twice, lost nodes replaced."""

import contextlib
import copy
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from .._base.extras import needed
from .._base.types import T
from ..errors import InputError, WorkerLost

# Seconds between two looks for machines that have joined, and that one may take to join when none is left (heuristic).
LOOK, WAIT = 10.0, 60.0
# Seconds that a first worker may take to come up once there was room for it: importing torch on a busy machine.
START = 300.0

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    Actor: TypeAlias = ActorHandle[Any]


class RayExecutor:
    """Workers on a Ray cluster: `tg.compute(…, executor=tg.RayExecutor("auto"))`.

    One actor per GPU of the cluster (where it has none, one per CPU); each keeps the kernel on its device between
    tasks. `address` as for `ray.init`: "auto" for the running cluster, "ray://host:10001", or None to start one here.
    `gpus` and `cpus` are what each worker takes; `runtime_env` goes to the actors. Machines that join are used, tasks
    of machines that are lost go to the others. Tiles come back to this process, which alone writes to the store: the
    machines need no common file system.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        gpus: float | None = None,
        cpus: float = 1,
        runtime_env: dict[str, object] | None = None,
    ) -> None:
        with needed("ray", "RayExecutor"):
            import ray
        self._ray = ray
        # What the user connected to stays connected when this is closed.
        self._started = not ray.is_initialized()
        if self._started:
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except OSError as e:
                if e.filename is None:  # no file: a cluster that does not answer
                    raise
                raise InputError(
                    f"Ray does not start: {e.filename}: {e.strerror}. It keeps a secret below HOME; where that "
                    "cannot be written to, give it one before Python starts: RAY_AUTH_TOKEN=$(openssl rand -hex 32)."
                ) from e
        self._gpus = (1.0 if ray.cluster_resources().get("GPU", 0) else 0.0) if gpus is None else gpus
        self._need = {kind: amount for kind, amount in (("GPU", self._gpus), ("CPU", cpus)) if amount}
        # Not restarted by Ray: a task must hear that its worker is gone, to be done again elsewhere.
        self._options: dict[str, Any] = {"num_gpus": self._gpus, "num_cpus": cpus, "max_restarts": 0}
        self._options["scheduling_strategy"] = "SPREAD"
        if runtime_env is not None:
            self._options["runtime_env"] = runtime_env
        self._load: dict[Actor, int] = {}  # live actors and the tasks that each has
        # Actors that are not up yet, each with the sign that it will give: a busy cluster may have no room after all.
        self._starting: dict[Actor, ObjectRef] = {}
        self._why = ""  # what became of the last one that did not come up
        self._shared: tuple[object, ObjectRef] | None = None  # the last job, and where Ray has it
        self._looked = 0.0  # when it was last looked for machines that joined, in seconds
        if not self._need:
            self.close()
            raise InputError(f"RayExecutor(gpus={gpus}, cpus={cpus}): needed: more than nothing for each worker.")
        begun = time.monotonic()
        while not self._load and self._slots() and time.monotonic() - begun < (START if self._starting else WAIT):
            self._grow(1.0)
        self._join(LOOK)  # one is up; the others take about as long
        if not self._load:
            free = ray.available_resources()
            self.close()
            raise InputError(
                f"the Ray cluster has no room for a worker with {self._gpus:g} GPUs and {cpus:g} CPUs on one machine; "
                f"it has {free} free in all. Ask for less: RayExecutor(gpus=…, cpus=…).{self._why}"
            )

    @property
    def workers(self) -> int:
        """How many actors take tasks now."""
        return len(self._load)

    def submit(self, f: Callable[..., T], /, *args: object) -> "_Answer[T]":
        """f(*args) on the actor with the fewest tasks. The first argument, which all tasks of a run share, is sent to
        each machine once."""
        # Actors that came up since take tasks; machines that joined get actors, looked for every now and then.
        self._join(0.0)
        if time.monotonic() - self._looked > LOOK:
            self._grow()
        end = time.monotonic() + WAIT
        while not self._load:
            if time.monotonic() > end:
                raise WorkerLost(f"no worker is left in the Ray cluster, and none joined within {WAIT:g} s.{self._why}")
            self._grow(1.0)
        if args and (self._shared is None or self._shared[0] is not args[0]):
            self._shared = args[0], self._ray.put(args[0])
        shared = (self._shared[1],) if args and self._shared is not None else ()
        actor = min(self._load, key=lambda a: self._load[a])
        self._load[actor] += 1
        return _Answer(self, actor, actor.call.remote(f, *shared, *args[1:]))

    def close(self) -> None:
        """End the workers, and the Ray runtime if it was started here."""
        for actor in [*self._load, *self._starting]:
            self._drop(actor)
        if self._started:
            self._ray.shutdown()

    def __repr__(self) -> str:
        return f"RayExecutor({self.workers} workers, each with {self._need})"

    def __enter__(self) -> "RayExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _slots(self) -> int:
        """Workers that the machines have room for when nobody else is there."""
        slots: list[int] = [self._fit(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]
        return sum(slots)

    def _fit(self, resources: dict[str, float]) -> int:
        """Workers that so much has room for."""
        return min(int(resources.get(kind, 0) // amount) for kind, amount in self._need.items())

    def _grow(self, wait: float = 0.0) -> None:
        """An actor for every free slot. It takes tasks once it is up, which it is given `wait` seconds for."""
        self._looked = time.monotonic()
        # Other programs of the cluster may hold some slots; what is free in all need not be free on one machine.
        room = min(self._slots() - len(self._load), self._fit(self._ray.available_resources()))
        for _ in range(room - len(self._starting)):
            actor: Any = self._ray.remote(**self._options)(_Actor).remote()  # Ray's types know no options
            self._starting[actor] = actor.call.remote(int)  # int() is 0: it says that the actor is up
        self._join(wait)
        if wait and not self._starting and not self._load:
            time.sleep(wait)

    def _join(self, wait: float) -> None:
        """The actors that are up take tasks; those that cannot start are given up."""
        signs = list(self._starting.values())
        up = self._ray.wait(signs, num_returns=len(signs), timeout=wait)[0] if signs else []
        for actor, sign in [pair for pair in self._starting.items() if pair[1] in up]:
            try:
                self._ray.get(sign)
                self._load[actor] = 0
                del self._starting[actor]
            except self._ray.exceptions.RayError as e:
                self._why = f" A worker did not come up: {e}"
                self._drop(actor)

    def _drop(self, actor: "Actor") -> None:
        """Forget an actor, and end it if it lives."""
        self._load.pop(actor, None)
        self._starting.pop(actor, None)
        with contextlib.suppress(Exception):  # it may be dead already, or the cluster gone
            self._ray.kill(actor)


class _Actor:
    """A process on some machine; what it holds between tasks is kept by `work.perform`."""

    def call(self, f: Callable[..., T], *args: object) -> T:
        """f(*args), here."""
        return f(*args)


class _Answer(Generic[T]):
    """A future of Ray, with its worker."""

    def __init__(self, executor: RayExecutor, actor: "Actor", reference: "ObjectRef") -> None:
        self._executor, self._actor, self._reference = executor, actor, reference

    def done(self) -> bool:
        """Whether the answer, or an error, is there."""
        return bool(self._executor._ray.wait([self._reference], timeout=0)[0])

    def result(self) -> T:
        """The answer, waited for; WorkerLost if its worker is gone."""
        errors = self._executor._ray.exceptions
        try:
            answer: T = self._executor._ray.get(self._reference)
        except (errors.RayActorError, errors.ObjectLostError, errors.WorkerCrashedError, errors.NodeDiedError) as e:
            self._executor._drop(self._actor)
            raise WorkerLost(f"a Ray worker is gone: {str(e).splitlines()[0]}") from e
        except errors.RayTaskError as e:
            self._release()
            # What the task raised, as it would have here, and not in Ray's wrapping.
            raise (e.cause if isinstance(e.cause, Exception) else e) from None
        self._release()
        return copy.deepcopy(answer)  # Ray's own arrays are read-only and keep its store full

    def _release(self) -> None:
        """The actor has one task less."""
        if self._actor in self._executor._load:
            self._executor._load[self._actor] -= 1
