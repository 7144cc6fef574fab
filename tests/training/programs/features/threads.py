"""Locks, threads, event loops and processes, and the queues and pipes between them."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

thread = partial(feature, __name__)

thread(
    "lock_that_is_held",
    imports="threading",
    setup="my_lock, my_again = threading.Lock(), threading.RLock()\nmy_depth = 0",
    step="""
if step % 3 == 0:
    my_lock.acquire(blocking=False)
elif step % 3 == 2 and my_lock.locked():
    my_lock.release()
my_again.acquire()
my_depth += 1
if step % 4 == 3:
    my_again.release()
    my_depth -= 1
my_v = my_lock.locked() * 2.5 + my_depth % 5
""",
    refusable="it holds a lock from step to step",
)
thread(
    "events_and_semaphores",
    imports="threading",
    setup="""
my_event, my_places, my_bar = threading.Event(), threading.Semaphore(4), threading.Condition()
my_n = 0
""",
    step="""
with my_bar:
    my_n += my_places.acquire(blocking=False)
if step % 4 == 1:
    my_event.set()
elif step % 4 == 3:
    my_event.clear()
    my_places.release(2)
my_v = my_event.is_set() * 1.5 + my_n * 0.5
""",
    refusable="it keeps its state in locks",
)
thread(
    "queues",
    imports="queue",
    setup="""
my_first, my_best = queue.Queue(), queue.PriorityQueue(9)
for my_n in (3, 1, 2):
    my_first.put(my_n)
    my_best.put((my_n, str(my_n)))
""",
    step="""
my_n = my_first.get()
my_first.put(my_n * 5 % 13 + step % 2)
my_p, my_s = my_best.get()
my_best.put((my_p + step % 4 + 1, my_s))
my_v = my_n + my_p * 0.5 + my_first.qsize()
""",
    finish="list(my_first.queue), sorted(my_best.queue)",
)
thread(
    "simple_queue",
    imports="queue",
    setup="my_queue = queue.SimpleQueue()\nmy_queue.put(2)\nmy_queue.put(7)",
    step="my_n = my_queue.get()\nmy_queue.put((my_n * 3 + step) % 17)\nmy_v = my_n",
    refusable="what is in such a queue cannot be seen",
)
thread(
    "thread_pool_in_the_step",
    imports="concurrent.futures",
    top="def my_work(n):\n    return n * n % 7\n",
    setup="my_sum = 0",
    step="""
with concurrent.futures.ThreadPoolExecutor(2) as my_pool:
    my_results = list(my_pool.map(my_work, range(step, step + 4)))
my_sum = (my_sum * 2 + sum(my_results)) % 29
my_v = my_sum
""",
    weight=0.6,
)
thread(
    "thread_pool_kept_open",
    imports="concurrent.futures",
    top="def my_work(n):\n    return n * n % 11\n",
    setup="my_pool = concurrent.futures.ThreadPoolExecutor(2)\nmy_waiting = [my_pool.submit(my_work, 1)]",
    step="""
my_waiting.append(my_pool.submit(my_work, step + 2))
my_v = my_waiting.pop(0).result() + len(my_waiting) * 0.1
if step % 4 == 2:
    my_waiting.append(my_pool.submit(my_work, step))
""",
    end="my_pool.shutdown()",
    refusable="it keeps threads from step to step",
    weight=0.6,
)
thread(
    "background_thread_with_state",
    imports="threading queue",
    top="""
class MyWorker(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.asked, self.told, self.total = queue.Queue(), queue.Queue(), 0
        self.start()

    def run(self):
        own = 1
        while (n := self.asked.get()) is not None:
            own = own * 3 % 41
            self.total += n + own
            self.told.put(self.total)
""",
    setup="my_worker = MyWorker()",
    step="my_worker.asked.put(step % 4)\nmy_v = my_worker.told.get() % 13",
    end="my_worker.asked.put(None)",
    refusable="a thread of its own changes the state",
    weight=0.6,
)
thread(
    "prefetching_thread",
    imports="threading queue",
    top="""
def my_produce(ready):
    n = 1
    while True:
        n = n * 7 % 101
        ready.put(n)
""",
    setup="""
my_ready = queue.Queue(maxsize=3)
my_thread = threading.Thread(target=my_produce, args=(my_ready,), daemon=True)
my_thread.start()
""",
    step="my_v = my_ready.get() % 9",
    refusable="a thread of its own reads ahead",
    weight=0.6,
)
thread(
    "timer_thread_joined",
    imports="threading",
    setup="my_box = [0]",
    step="""
my_thread = threading.Thread(target=lambda: my_box.append((my_box[-1] * 3 + 1) % 47))
my_thread.start()
my_thread.join()
my_v = my_box[-1] % 11
""",
    weight=0.6,
)
thread(
    "event_loop_kept",
    imports="asyncio",
    top="""
async def my_turn(queue, n):
    await queue.put(n)
    await asyncio.sleep(0)
    return (await queue.get()) * 2 + queue.qsize()
""",
    setup="""
my_loop = asyncio.new_event_loop()
my_queue = asyncio.Queue()
my_queue.put_nowait(3)
my_queue.put_nowait(4)
""",
    step="my_v = my_loop.run_until_complete(my_turn(my_queue, step % 5))",
    end="my_loop.close()",
    refusable="it keeps an event loop",
    weight=0.6,
)
thread(
    "asyncio_run_in_the_step",
    imports="asyncio",
    top="""
async def my_gather(state):
    async def one(k):
        await asyncio.sleep(0)
        state[k] += k + 1
        return state[k]

    return sum(await asyncio.gather(*(one(k) for k in range(3))))
""",
    setup="my_state = [0, 1, 2]",
    step="my_v = asyncio.run(my_gather(my_state)) % 17",
    weight=0.5,
)
thread(
    "child_process_kept",
    imports="subprocess",
    setup="my_child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\nmy_pending = 0",
    step="""
my_child.stdin.write(b'%d\\n' % (step * 3 % 8))
my_child.stdin.flush()
my_pending += 1
my_v = int(my_child.stdout.readline()) + my_pending * 0.1
""",
    end="my_child.stdin.close()\nmy_child.wait()\nmy_child.stdout.close()",
    refusable="it talks to a process that it started",
    weight=0.3,
)
thread(
    "socket_pair",
    imports="socket",
    setup="my_here, my_there = socket.socketpair()\nmy_there.sendall(b'abc')",
    step="my_there.sendall(bytes([65 + step % 26]))\nmy_v = my_here.recv(1)[0] % 9",
    end="my_here.close()\nmy_there.close()",
    refusable="its state is in a socket",
    weight=0.5,
)
thread(
    "pipe_of_the_system",
    imports="os",
    setup="my_read, my_write = os.pipe()\nos.write(my_write, b'xyz')",
    step="os.write(my_write, bytes([70 + step % 20]))\nmy_v = os.read(my_read, 1)[0] % 7",
    end="os.close(my_read)\nos.close(my_write)",
    refusable="its state is in a pipe",
    weight=0.5,
)
