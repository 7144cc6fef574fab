"""Numbers, texts, arrays and random states whose exact kind, layout or bits are easily lost."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

value = partial(feature, __name__)

value(
    "int_subclass",
    top="""
class MyInt(int):
    def __new__(cls, n, unit='m'):
        made = super().__new__(cls, n)
        made.unit = unit
        return made
""",
    setup="my_n = MyInt(3)",
    step="my_n = MyInt(my_n * 3 % 41, my_n.unit + 'ms'[step % 2])\nmy_v = my_n + my_n.unit.count('s') * 0.5",
    finish="my_n, my_n.unit, type(my_n).__name__[-5:]",
)
value(
    "text_and_float_subclasses",
    top="""
class MyText(str):
    count = 0

class MyFloat(float):
    def __repr__(self):
        return 'F' + self.hex()
""",
    setup="my_text, my_f = MyText('ab'), MyFloat(0.1)\nmy_text.count = 1",
    step="""
my_count = my_text.count
my_text = MyText((my_text + 'abc'[step % 3])[-6:])
my_text.count = my_count + 1
my_f = MyFloat(my_f * 1.7 % 3)
my_v = my_text.count * 0.1 + len(my_text) + my_f + len(repr(my_f)) * 0.01
""",
    finish="my_text, my_f, my_text.count",
)
value(
    "decimal_context",
    imports="decimal",
    setup="decimal.getcontext().prec = 6\nmy_d = decimal.Decimal(1)",
    step="""
if step == 4:
    decimal.getcontext().prec = 11
    decimal.getcontext().rounding = decimal.ROUND_UP
my_d = (my_d / 3 + step) % 17
my_v = float(my_d) + decimal.getcontext().prec * 0.1
""",
    end="decimal.getcontext().prec = 28\ndecimal.getcontext().rounding = decimal.ROUND_HALF_EVEN",
    finish="my_d",
    reset="my_d = decimal.Decimal(1)",
)
value(
    "decimal_flags_and_traps",
    imports="decimal",
    setup="my_context = decimal.Context(prec=4, traps=[])",
    step="""
my_c = my_context.divide(decimal.Decimal(step + 1), decimal.Decimal(4 if step < 5 else 7))
if step % 5 == 0:
    my_context.prec += 1
my_v = float(my_c) + bool(my_context.flags[decimal.Inexact]) + my_context.prec * 0.1
""",
)
value(
    "fraction_and_complex",
    imports="fractions",
    setup="my_f, my_c = fractions.Fraction(1, 3), complex(0.5, -0.0)",
    step="""
my_f = (my_f * 7 + fractions.Fraction(step, 5)) % 4
my_c = my_c * (0.6 + 0.8j) + step % 2
my_v = float(my_f) + my_c.real * 0.5 + my_c.imag
""",
    finish="my_f, my_c",
)
value(
    "dates_and_zones",
    imports="datetime",
    setup="""
my_zone = datetime.timezone(datetime.timedelta(hours=2), 'Z2')
my_at = datetime.datetime(2024, 2, 27, 23, 30, tzinfo=my_zone, fold=1)
""",
    step="""
my_at += datetime.timedelta(hours=step * 7 % 31, microseconds=step)
my_v = my_at.day % 9 + my_at.hour * 0.1 + (my_at.tzinfo is my_zone)
""",
    finish="my_at",
)
value(
    "big_integers",
    setup="my_big = 3 ** 60",
    step="""
my_big = my_big * (step + 2) + 1 if my_big.bit_length() < 300 else my_big >> 120
my_v = my_big % 1000003 % 17
""",
    finish="my_big",
)
value(
    "not_a_number_with_a_payload",
    imports="struct numpy",
    setup="""
my_nan = struct.unpack('<d', struct.pack('<Q', 0x7FF8000000000001))[0]
my_nans = numpy.array([my_nan])
""",
    step="""
my_bits = struct.unpack("<Q", struct.pack("<d", my_nan))[0]
my_nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000 | (my_bits * 5 + step) % 9973))[0]
my_nans[0] = my_nan
my_v = my_bits % 13 + int(my_nans.view("<u8")[0] % 5)
""",
)
value(
    "negative_zero_and_infinity",
    imports="math",
    setup="my_z, my_list = -0.0, [-0.0, float('inf'), 5e-324]",
    step="""
my_z = -my_z if step % 3 == 1 else my_z
my_list[step % 2] = -my_list[step % 2]
my_list[2] *= 2
my_v = math.copysign(1, my_z) + math.copysign(0.5, my_list[0]) + math.copysign(0.25, my_list[1]) + my_list[2] * 1e300 * 1e20
""",
    finish="my_z, my_list",
)
value(
    "surrogates_and_null_bytes",
    setup="my_text, my_bytes, my_table = 'a\\udc80\\ud83d', b'\\x00\\xff', {}",
    step="""
my_text = (my_text + chr(0xDC00 + step))[-5:]
my_bytes = (my_bytes + bytes([step * 37 % 256, 0]))[-7:]
my_v = sum(map(ord, my_text)) % 13 + sum(my_bytes) % 7
my_table = {my_text: 1}
""",
    finish="my_text, my_bytes, my_table",
)
value(
    "bool_int_and_numpy_scalars",
    imports="numpy",
    setup="my_flag, my_small, my_half = True, numpy.int8(100), numpy.float32(0.1)",
    step="""
my_flag = not my_flag if step % 3 else my_flag
with numpy.errstate(over='ignore'):
    my_small = numpy.int8(my_small + numpy.int8(step % 5))
my_half = my_half * numpy.float32(1.1)
my_v = my_flag + int(my_small) % 7 + float(my_half) + isinstance(my_flag, bool) * 0.5
""",
    finish="my_flag, my_small, my_half, type(my_half).__name__",
)
value(
    "structured_array",
    imports="numpy",
    setup="my_rows = numpy.zeros(4, dtype=[('n', '<i4'), ('p', '>f8', (2,)), ('s', 'U3')])",
    step="""
my_rows['n'][step % 4] += step
my_rows[step % 4]['p'] += [0.5, step % 3]
my_rows[1]['s'] = str(step * 7)
my_v = int(my_rows['n'].sum()) % 9 + float(my_rows['p'].sum()) % 4 + len(my_rows[1]['s'])
""",
    finish="my_rows.tolist(), my_rows.dtype",
)
value(
    "object_array",
    imports="numpy",
    setup="""
my_cells = numpy.empty(4, dtype=object)
my_cells[:] = [[1], 'a', None, {'n': 1}]
my_first = my_cells[0]
""",
    step="""
my_first.append(step % 3)
my_cells[3]['n'] += len(my_cells[0])
my_cells[1 + step % 2] = step
my_v = my_cells[3]['n'] % 8 + (my_cells[0] is my_first)
""",
    finish="my_cells.tolist()",
)
value(
    "dates_in_arrays",
    imports="numpy",
    setup="""
my_days = numpy.array(['2024-02-28', 'NaT'], dtype='datetime64[D]')
my_span = numpy.timedelta64(36, 'h')
""",
    step="""
my_days[0] += step % 3 + 1
my_span = my_span + numpy.timedelta64(step, 'm')
my_v = int(my_days[0].astype('int64')) % 11 + float(my_span / numpy.timedelta64(1, 'D'))
""",
    finish="my_days.astype(str).tolist(), str(my_span)",
)
value(
    "masked_array",
    imports="numpy",
    setup="my_masked = numpy.ma.array(numpy.arange(6.0), mask=[0, 1, 0, 0, 0, 0], fill_value=-7)",
    step="""
my_masked[step % 6] = numpy.ma.masked if step % 4 == 1 else step * 1.5
my_v = float(my_masked.sum()) % 12 + float(my_masked.filled()[3]) % 5 + int(my_masked.count()) * 0.1
""",
    finish="my_masked.filled().tolist(), my_masked.fill_value.tolist()",
)
value(
    "fortran_order",
    imports="numpy",
    setup="my_grid = numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4))",
    step="""
my_grid.T.flat[step % 12] += 1.5
my_grid = my_grid[::-1] if step % 5 == 3 else my_grid
my_v = float(my_grid.ravel(order='K')[step % 12]) + my_grid.flags.f_contiguous * 2 + my_grid.strides[0] % 7 * 0.1
""",
    finish="my_grid.tolist(), my_grid.strides",
)
value(
    "negative_strides_and_broadcast",
    imports="numpy",
    setup="""
my_base = numpy.arange(20.0)
my_back = my_base[::-3]
my_wide = numpy.broadcast_to(my_base[:3], (2, 3))
""",
    step="""
my_back[step % len(my_back)] += 2
my_base[step % 3] *= 0.5
my_v = float(my_back.sum()) % 9 + float(my_wide.sum()) + my_wide.flags.writeable
""",
    finish="my_base.tolist(), my_back.strides, my_wide.strides",
)
value(
    "record_array",
    imports="numpy",
    setup="my_log = numpy.rec.array([(1, 0.5)], dtype=[('at', int), ('loss', float)])",
    step="""
my_log = numpy.append(my_log, numpy.rec.array([(step, my_log.loss[-1] * 0.8 + step % 2)], dtype=my_log.dtype)).view(numpy.recarray)
my_v = float(my_log.loss[-1]) + my_log.at[-1] % 3
""",
    finish="my_log.loss.tolist()",
)
value(
    "empty_scalar_and_odd_arrays",
    imports="numpy",
    setup="""
my_point = numpy.array(1.5)
my_none = numpy.zeros((0, 3))
my_swapped = numpy.arange(4, dtype='>i2')
my_halves = numpy.ones(3, dtype='float16')
""",
    step="""
my_point *= 0.9
my_point += step % 2
my_none = numpy.zeros((0, my_none.shape[1] + 1))
my_swapped[step % 4] += 300
my_halves += numpy.float16(0.1)
my_v = float(my_point) + my_none.shape[1] % 5 + int(my_swapped.view('<i2')[2]) % 7 + float(my_halves[0])
""",
    finish="my_point.tolist(), my_none.shape, my_swapped.tolist(), my_swapped.dtype.str, my_halves.tolist()",
)
value(
    "text_and_bytes_arrays",
    imports="numpy",
    setup="my_words = numpy.array(['a', 'bcd'])\nmy_raw = numpy.array([b'x\\x00y', b'z'])",
    step="""
my_words[step % 2] = 'abcdef'[: step % 5]
my_raw[step % 2] = bytes([65 + step % 20, 0, 66])
my_v = sum(map(len, my_words.tolist())) + len(my_raw.tobytes().rstrip(b'\\x00')) * 0.5 + my_raw.tobytes()[0] % 3
""",
    finish="my_words.tolist(), my_raw.tolist()",
)
value(
    "read_only_array_and_flags",
    imports="numpy",
    setup="my_fixed = numpy.arange(3.0)\nmy_fixed.flags.writeable = False",
    step="""
my_v = 0.0
try:
    my_fixed[0] += 1
    my_v += 2
except ValueError:
    my_v += 1
if step % 5 == 2:
    my_fixed.flags.writeable = not my_fixed.flags.writeable
my_v += float(my_fixed[0])
""",
)
value(
    "array_subclass_with_attributes",
    imports="numpy",
    top="""
class MyImage(numpy.ndarray):
    def __array_finalize__(self, other):
        self.scale = getattr(other, "scale", 1.0)
""",
    setup="my_image = numpy.ones(3).view(MyImage)\nmy_image.scale = 2.0",
    step="""
my_image += step % 2
my_image *= 0.75
my_image.scale = my_image.scale * 1.3 % 4
my_v = float(my_image.sum()) * 0.5 + my_image[1:].scale
""",
    finish="my_image.tolist(), my_image.scale",
)
value(
    "arrays_that_share_memory",
    imports="numpy",
    setup="my_store = numpy.zeros(9)\nmy_a, my_b = my_store[:6], my_store[3:]\ndel my_store",
    step="my_a += step % 3\nmy_b *= 0.5\nmy_v = float(my_a[4]) + float(my_b[-1]) + float(my_a.base[8])",
    finish="my_a.base.tolist()",
    reset="my_a, my_b = numpy.zeros(9)[:6], numpy.zeros(6)",
)
value(
    "half_drawn_random_numbers",
    imports="numpy random",
    setup="my_rng, my_random = numpy.random.default_rng(«1..99»), random.Random(5)",
    step="""
my_v = int(my_rng.integers(0, 50, dtype='uint32')) % 9 + my_random.gauss(0, 1)
if step % 2:
    my_v += float(my_rng.standard_normal(dtype='float32'))
""",
)
value(
    "legacy_random_states",
    imports="numpy",
    setup="""
my_state = numpy.random.RandomState(«1..99»)
my_other = numpy.random.RandomState(numpy.random.PCG64(3))
""",
    step="my_v = float(my_state.randn()) + float(my_other.rand()) + int(my_state.randint(7)) * 0.1",
)
value(
    "bit_generators",
    imports="numpy",
    setup="""
my_sources = [numpy.random.Generator(kind(«1..99»)) for kind in (numpy.random.Philox, numpy.random.SFC64, numpy.random.MT19937)]
my_bits = my_sources[0].bit_generator
""",
    step="my_v = sum(float(source.random()) for source in my_sources) + my_bits.random_raw() % 5",
)
value(
    "random_subclass",
    imports="random",
    top="""
class MyRandom(random.Random):
    draws = 0

    def random(self):
        self.draws += 1
        return super().random() * 0.5
""",
    setup="my_random = MyRandom(«1..99»)",
    step="my_v = my_random.random() + my_random.uniform(0, 3) + my_random.draws * 0.1",
)
value(
    "own_generator_of_numbers",
    top="""
class MyNumbers:
    def __init__(self, seed):
        self.state = seed

    def __call__(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 40) / 2**24
""",
    setup="my_draw = MyNumbers(«1..99»)",
    step="my_v = my_draw() * 5",
)
value(
    "state_of_a_random_source_put_back",
    imports="random numpy",
    setup="""
my_before = random.getstate()
my_rng = numpy.random.default_rng(8)
my_kept = my_rng.bit_generator.state
""",
    step="""
my_v = random.random() + float(my_rng.random())
if step % 4 == 3:
    random.setstate(my_before)
    my_rng.bit_generator.state = my_kept
if step % 6 == 2:
    my_before, my_kept = random.getstate(), my_rng.bit_generator.state
""",
    reset="my_before = random.Random(77).getstate()\nrandom.setstate(my_before)",
)
value(
    "numbers_of_the_system",
    imports="random",
    setup="my_system = random.SystemRandom()\nmy_numbers, my_total = [], 0",
    step="""
my_numbers.append(my_system.getrandbits(30))
my_total += my_numbers[-1]
my_v = (1.0 if sum(my_numbers) == my_total else 5.0) + len(my_numbers) * 0.1
""",
    refusable="it draws from the system's random numbers",
)
value(
    "numbers_of_the_clock",
    imports="time",
    setup="my_times = [time.monotonic()]\nmy_sum = my_times[0]",
    step="""
my_times.append(time.monotonic())
my_sum += my_times[-1]
my_v = (1.0 if abs(sum(my_times) - my_sum) < 1e-6 else 5.0) + len(my_times) * 0.1 + (my_times[-1] < my_times[-2])
""",
    refusable="it reads the clock",
)
value(
    "hash_of_a_text",
    setup="my_codes, my_log = {}, []",
    step="""
my_word = "word" + str(step % 4)
my_log.append(my_codes.setdefault(my_word, hash(my_word)) == hash(my_word))
my_v = sum(my_log) * 0.25 + len(my_codes)
""",
    refusable="the hash of a text is another in each process",
)
value(
    "patterns_matches_and_paths",
    imports="re pathlib",
    setup="my_pattern = re.compile(r'(\\d)(\\d*)', re.I)\nmy_path = pathlib.PurePosixPath('a')",
    step="""
my_match = my_pattern.search('x' * (step % 3) + str(step * 37 % 500))
my_path = (my_path / my_match[1]) if len(my_path.parts) < 5 else my_path.parent.parent
my_v = my_match.end() + len(str(my_path)) * 0.5
""",
    finish="str(my_path)",
    reset="my_path = pathlib.PurePosixPath('other/a')",
)
value(
    "match_object_carried",
    refusable="such an object cannot be made",
    imports="re",
    setup="my_match = re.search('b+', 'abba')",
    step="""
my_v = my_match.end() + int(my_match.string.count('b')) * 0.5
my_match = re.search('b+', 'a' * (my_match.end() % 4) + 'b' * (step % 3 + 1))
""",
)
value(
    "ranges_slices_and_views",
    setup="my_range, my_slice, my_dict = range(3), slice(0, 4), {'a': 1}\nmy_keys = my_dict.keys()",
    step="""
my_range = range(my_range.start + 1, my_range.stop + step % 3 + 1, 2)
my_slice = slice(my_slice.start, my_slice.stop + 1, step % 2 + 1)
my_dict[str(step % 7)] = step
my_v = len(my_range) + sum(range(20)[my_slice]) % 9 + len(my_keys)
""",
    finish="my_range, my_slice, my_keys",
)
value(
    "type_hints_and_ellipsis",
    imports="typing",
    setup="my_kind = list[int]",
    step="""
my_kind = dict[str, my_kind] if step % 3 else typing.Optional[int]
my_v = len(str(my_kind)) % 12 + len(typing.get_args(my_kind))
""",
)
value(
    "interned_and_equal_texts",
    setup="my_words = ['x' * 3]\nmy_first = my_words[0]",
    step="""
my_words.append(my_words[0] if step % 3 else ''.join(['x', 'xx']))
my_v = sum(word is my_first for word in my_words) * 0.5
""",
)
value(
    "identifiers_of_an_own_source",
    imports="random uuid",
    setup="my_random = random.Random(«1..99»)\nmy_ids = []",
    step="""
my_ids.append(uuid.UUID(int=my_random.getrandbits(128), version=4))
my_v = my_ids[-1].int % 11 + len({i.hex[0] for i in my_ids}) * 0.5
""",
)
value(
    "polynomials_and_matrices",
    imports="numpy",
    setup="""
my_poly = numpy.polynomial.Polynomial([1.0, 0.5])
my_matrix = numpy.asmatrix([[1.0, 0.2], [0.1, 0.9]])
""",
    step="""
my_poly = (my_poly * numpy.polynomial.Polynomial([0.5, step % 3])).truncate(4)
my_matrix = my_matrix * my_matrix / my_matrix.max()
my_v = float(my_poly(0.3)) + float(my_matrix[0, 1])
""",
    finish="my_poly.coef.tolist(), my_matrix.tolist()",
)
value(
    "sums_in_a_certain_order",
    setup="my_terms = [1e16, 1.0, -1e16, 0.1]",
    step="my_terms.append(my_terms.pop(step % 3) * 0.999)\nmy_v = sum(my_terms) % 10",
)
