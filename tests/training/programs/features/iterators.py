"""Iterators and generators that are read a little further in each step, in all the ways that are not `next(name)` in the loop."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

iterator = partial(feature, __name__)

iterator(
    "next_in_a_helper",
    top="""
def my_take(source):
    return next(source)
""",
    setup="my_numbers = iter([n * n % «11..17» for n in range(60)])",
    step="my_v = my_take(my_numbers)",
)
iterator(
    "islice_of_a_shared_iterator",
    imports="itertools",
    setup="my_source = iter(range(«1..9», 500))",
    step="my_v = sum(itertools.islice(my_source, «2..3»)) % 23",
)
iterator(
    "two_tees",
    imports="itertools",
    setup="""
my_fast, my_slow = itertools.tee(n * 7 % 13 for n in range(400))
next(my_fast)
""",
    step="my_v = next(my_fast) - 0.5 * next(my_slow)\nif step % 3 == 0:\n    my_v += next(my_fast)",
)
iterator(
    "groupby_kept_open",
    imports="itertools",
    setup="my_groups = itertools.groupby((n * n // 5 for n in range(300)), key=lambda n: n // 3)",
    step="my_key, my_members = next(my_groups)\nmy_v = my_key % 7 + sum(my_members) % 5",
)
iterator(
    "pairwise_kept",
    imports="itertools",
    setup="my_pairs = itertools.pairwise(n * «3..6» % 17 for n in range(200))",
    step="my_a, my_b = next(my_pairs)\nmy_v = my_a - my_b",
)
iterator(
    "inner_for_and_break",
    setup="my_rest = iter(range(«0..4», 900))",
    step="""
for my_n in my_rest:
    if my_n % «4..6» == 0:
        break
my_v = my_n % 19
""",
)
iterator(
    "lines_of_a_file",
    files={"my_lines.txt": "".join(f"{n * 37 % 101} {n}\n" for n in range(80))},
    setup='my_file = open("my_lines.txt")',
    step="my_v = int(my_file.readline().split()[0]) % 9",
    end="my_file.close()",
)
iterator(
    "file_read_by_for_and_break",
    files={"my_words.txt": "\n".join("abcdefg"[: n % 7 + 1] for n in range(120)) + "\n"},
    setup='my_file = open("my_words.txt")',
    step="""
for my_line in my_file:
    if len(my_line) != 3:
        break
my_v = len(my_line)
""",
    end="my_file.close()",
)
iterator(
    "csv_reader",
    imports="csv",
    files={"my_rows.csv": "".join(f"{n},{n * n % 31}\n" for n in range(70))},
    setup='my_file = open("my_rows.csv", newline="")\nmy_rows = csv.reader(my_file)',
    step="my_v = float(next(my_rows)[1])",
    end="my_file.close()",
)
iterator(
    "csv_dict_reader",
    imports="csv",
    files={"my_table.csv": "a,b\n" + "".join(f"{n % 7},{n * 5 % 13}\n" for n in range(70))},
    setup='my_file = open("my_table.csv", newline="")\nmy_rows = csv.DictReader(my_file)',
    step="""
my_row = next(my_rows)
my_v = float(my_row["a"]) - 0.3 * float(my_row["b"]) + 0.01 * my_rows.line_num
""",
    end="my_file.close()",
)
iterator(
    "zip_with_cycle",
    imports="itertools",
    setup="my_both = zip(itertools.count(«1..9»), itertools.cycle([0.5, -1.25, 2.0]))",
    step="my_n, my_s = next(my_both)\nmy_v = my_n % 5 * my_s",
)
iterator(
    "call_until_a_sentinel",
    top="""
class MyMeter:
    value = 0

    def read(self):
        self.value += «3..5»
        return self.value
""",
    setup="my_meter = MyMeter()\nmy_reads = iter(my_meter.read, -1)",
    step="my_v = next(my_reads) % 17",
)
iterator(
    "enumerate_kept",
    setup="my_count = enumerate((n * 3 % 8 for n in range(300)), start=«2..30»)",
    step="my_i, my_n = next(my_count)\nmy_v = my_i % 6 + my_n",
)
iterator(
    "map_over_a_closure",
    top="""
def my_scaler(factor):
    seen = []

    def scale(n):
        seen.append(n)
        return n * factor + len(seen)

    return scale
""",
    setup="my_scaled = map(my_scaler(0.5), iter(range(«1..7», 400)))",
    step="my_v = next(my_scaled) % 9",
)
iterator(
    "filter_over_a_closure",
    top="""
def my_new():
    seen = set()

    def unseen(n):
        if n in seen:
            return False
        seen.add(n)
        return True

    return unseen
""",
    setup="my_fresh = filter(my_new(), (n * n % 101 for n in range(3, 300)))",
    step="my_v = next(my_fresh) % 10",
)
iterator(
    "dict_iterator",
    setup="my_table = {n * 7 % 53: n * n % 11 for n in range(50)}\nmy_items = iter(my_table.items())",
    step="my_k, my_n = next(my_items)\nmy_v = my_k % 5 + my_n\nmy_table[my_k] = my_v",
    finish="list(my_table.values())[:20]",
)
iterator(
    "set_iterator",
    setup="my_set = {n * 3 % 61 for n in range(60)}\nmy_members = iter(my_set)",
    step="my_v = next(my_members) % 12",
)
iterator(
    "reversed_kept",
    setup="my_list = [n * n % 29 for n in range(70)]\nmy_back = reversed(my_list)",
    step="my_v = next(my_back)",
)
iterator(
    "chain_from_iterable",
    imports="itertools",
    setup="my_chain = itertools.chain.from_iterable([k] * (k % 3 + 1) for k in range(100))",
    step="my_v = next(my_chain) * 0.5",
)
iterator(
    "accumulate_kept",
    imports="itertools operator",
    setup="my_sums = itertools.accumulate((n % 4 + 1 for n in itertools.count()), operator.add)",
    step="my_v = next(my_sums) % 15",
)
iterator(
    "count_with_a_fraction",
    imports="itertools",
    setup="my_ticks = itertools.count(0.5, 0.1)",
    step="my_v = next(my_ticks)",
)
iterator(
    "cycle_in_its_second_round",
    imports="itertools",
    setup="my_round = itertools.cycle(n * n for n in range(«3..5»))",
    step="my_v = next(my_round)",
)
iterator(
    "permutations_kept",
    imports="itertools",
    setup="my_orders = itertools.permutations([1, 2, 4, 8], 3)",
    step="my_a, my_b, my_c = next(my_orders)\nmy_v = my_a - my_b * 0.5 + my_c * 0.25",
)
iterator(
    "product_and_combinations",
    imports="itertools",
    setup="my_grid = itertools.product(range(5), range(7))\nmy_pick = itertools.combinations(range(9), 3)",
    step="my_v = sum(next(my_grid)) - 0.25 * sum(next(my_pick))",
)
iterator(
    "takewhile_and_dropwhile",
    imports="itertools",
    setup="my_tail = itertools.dropwhile(lambda n: n < 5, itertools.takewhile(lambda n: n < 900, itertools.count()))",
    step="my_v = next(my_tail) % 8",
)
iterator(
    "zip_longest_and_starmap",
    imports="itertools",
    setup="""
my_pairs = itertools.zip_longest(range(60), iter([3, 1, 4, 1, 5]), fillvalue=-1)
my_powers = itertools.starmap(lambda a, b: (a + 2) * b % 9, my_pairs)
""",
    step="my_v = next(my_powers)",
)
iterator(
    "compress_by_a_generator",
    imports="itertools",
    setup="my_chosen = itertools.compress(itertools.count(), (n % 3 != 1 for n in itertools.count()))",
    step="my_v = next(my_chosen) % 7",
)
iterator(
    "characters_and_bytes",
    setup="""
my_chars = iter('the quick brown fox jumps over the lazy dog, twice a day')
my_bytes = iter(bytes(range(200, 120, -1)))
""",
    step="my_v = ord(next(my_chars)) % 10 + next(my_bytes) % 3",
)
iterator(
    "deque_iterator",
    imports="collections",
    setup="my_deque = collections.deque(range(3, 80))\nmy_it = iter(my_deque)\nmy_back = reversed(my_deque)",
    step="my_v = next(my_it) % 5 - next(my_back) % 4",
)
iterator(
    "numpy_iterators",
    refusable="the place of such an iterator cannot be set",
    imports="numpy",
    setup="""
my_array = numpy.arange(120.0).reshape(10, 12) % 13
my_flat = my_array.flat
my_places = numpy.ndenumerate(my_array)
my_cursor = numpy.nditer(my_array)
""",
    step="my_v = float(next(my_flat)) + next(my_places)[0][1] * 0.5 - float(next(my_cursor)) * 0.25",
    weight=0.6,
)
iterator(
    "regular_expression_matches",
    refusable="the place of such an iterator cannot be read",
    imports="re",
    setup="my_text = ' '.join(str(n * 17 % 91) for n in range(80))\nmy_found = re.finditer(r'\\d+', my_text)",
    step="my_match = next(my_found)\nmy_v = int(my_match[0]) % 6 + my_match.start() % 4",
)
iterator(
    "struct_records",
    refusable="the place of such an iterator cannot be read",
    imports="struct",
    setup="my_records = struct.iter_unpack('<hB', bytes(n * 11 % 251 for n in range(240)))",
    step="my_a, my_b = next(my_records)\nmy_v = my_a % 21 + my_b % 4",
)
iterator(
    "sequence_protocol",
    top="""
class MySequence:
    def __init__(self):
        self.asked = 0

    def __getitem__(self, at):
        self.asked += 1
        return at * 3 % 14 + self.asked % 3
""",
    setup="my_sequence = MySequence()\nmy_it = iter(my_sequence)",
    step="my_v = next(my_it)",
)
iterator(
    "iterator_class",
    top="""
class MyCountdown:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return self

    def __next__(self):
        self.n -= 1
        return self.n * self.n % 12
""",
    setup="my_down = MyCountdown(«50..90»)",
    step="my_v = next(my_down)",
)
iterator(
    "one_iterator_in_three_places",
    setup="my_it = iter(range(«5..9», 400))\nmy_threes = zip(my_it, my_it, my_it)",
    step="""
my_a, my_b, my_c = next(my_threes)
my_v = (my_a + my_b * 2 + my_c) % 10
if step % 4 == 2:
    my_v += next(my_it) % 3
""",
)
iterator(
    "copied_iterator",
    imports="copy",
    setup="my_it = iter([n * 7 % 10 for n in range(200)])\nmy_ahead = copy.copy(my_it)",
    step="my_v = next(my_it)\nif step % 3 == 0:\n    my_ahead = copy.copy(my_it)\nmy_v += 0.5 * next(my_ahead)",
)
iterator(
    "range_iterator_kept",
    setup="my_range = iter(range(«3..40», 2000, 7))",
    step="my_v = next(my_range) % 16",
)
iterator(
    "object_array_of_iterators",
    setup="my_its = {'a': iter([1, 5, 2] * 30), 'b': iter(range(100)), 'c': map(abs, range(-90, 0))}",
    step="my_v = sum(next(it) for it in my_its.values()) % 14",
)
