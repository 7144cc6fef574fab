"""Objects of the standard library and of packages, locks and threads: state that somebody else's class keeps."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

library = partial(feature, __name__)

library(
    "data_frame_that_grows",
    imports="pandas",
    needs="pandas",
    setup="my_log = pandas.DataFrame({'at': [0], 'loss': [1.0]})",
    step="""
my_log.loc[len(my_log)] = {"at": step, "loss": my_log["loss"].iloc[-1] * 0.9 + step % 2}
my_v = float(my_log["loss"].tail(3).mean()) + len(my_log) * 0.1
""",
    finish="my_log.to_csv()",
    weight=0.5,
)
library(
    "data_frame_changed_in_place",
    imports="pandas",
    needs="pandas",
    setup="my_table = pandas.DataFrame({'k': pandas.Categorical(list('aabb')), 'n': [1.0, 2.0, 3.0, 4.0]}, index=list('wxyz'))",
    step="""
my_table.loc["wxyz"[step % 4], "n"] += step % 3
my_table["m"] = my_table["n"].cumsum()
my_v = float(my_table.groupby("k", observed=True)["m"].mean().iloc[0]) % 9
""",
    finish="my_table.to_csv()",
    weight=0.5,
)
library(
    "partial_fit",
    imports="numpy sklearn.linear_model",
    needs="sklearn",
    setup="my_model = sklearn.linear_model.SGDRegressor(random_state=3, learning_rate='constant', eta0=0.01)",
    step="""
my_model.partial_fit([[step % 3, 1.0], [x, 0.5]], [step % 4, x])
my_v = float(my_model.predict([[1.0, 2.0]])[0]) + my_model.t_ * 0.01
""",
    finish="my_model.coef_.tolist()",
    weight=0.5,
)
library(
    "scaler_and_clusters",
    imports="numpy sklearn.preprocessing sklearn.cluster",
    needs="sklearn",
    setup="""
my_scaler = sklearn.preprocessing.StandardScaler()
my_clusters = sklearn.cluster.MiniBatchKMeans(2, random_state=1, n_init=1)
""",
    step="""
my_rows = numpy.array([[step % 5, 1.0], [step * 2 % 7, 0.0], [3.0, step % 2]])
my_scaler.partial_fit(my_rows)
my_clusters.partial_fit(my_rows)
my_v = float(my_scaler.mean_[0]) + float(my_clusters.cluster_centers_.sum()) % 5
""",
    weight=0.3,
)
library(
    "logging_handler",
    imports="logging",
    top="""
class MyCounting(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())
""",
    setup="""
my_logger, my_handler = logging.getLogger("my_log"), MyCounting()
my_logger.handlers[:] = [my_handler]
my_logger.propagate = False
my_logger.setLevel(logging.INFO)
""",
    step="""
my_logger.info("step %d", step)
my_logger.debug("hidden")
if step == 6:
    my_logger.setLevel(logging.DEBUG)
my_v = sum(map(len, my_handler.texts)) % 17
""",
)
library(
    "logging_filter_and_level",
    imports="logging",
    top="""
class MyEvery:
    seen = 0

    def filter(self, record):
        self.seen += 1
        return self.seen % 3 == 0
""",
    setup="""
my_logger, my_filter = logging.Logger("my_own"), MyEvery()
my_logger.addFilter(my_filter)
my_logger.addHandler(logging.NullHandler())
""",
    step="""
my_logger.warning('x')
my_v = my_filter.seen % 5 + my_logger.level * 0.1
my_logger.setLevel(my_logger.level % 40 + 10)
""",
)
library(
    "arguments_namespace",
    imports="argparse",
    setup="""
my_parser = argparse.ArgumentParser()
my_parser.add_argument("--rate", type=float, default=0.5)
my_args = my_parser.parse_args([])
""",
    step="""
my_args.rate = my_args.rate * 0.9 + 0.2 * (step % 2)
my_args.last = step
my_v = my_args.rate * 3 + my_args.last % 2
""",
    finish="my_args",
)
library(
    "config_parser",
    imports="configparser",
    setup="my_config = configparser.ConfigParser()\nmy_config.read_dict({'a': {'n': '1', 'm': '%(n)s0'}})",
    step="""
my_config["a"]["n"] = str((int(my_config["a"]["n"]) * 3 + step) % 17)
if not my_config.has_section("s" + str(step % 4)):
    my_config.add_section("s" + str(step % 4))
my_v = my_config.getint("a", "m") % 13 + len(my_config.sections()) * 0.2
""",
)
library(
    "round_trips",
    imports="json pickle copy",
    setup="my_text, my_pickled = json.dumps({'n': 1, 'l': []}), pickle.dumps({'k': (1, 2)})",
    step="""
my_read = json.loads(my_text)
my_read["n"] = (my_read["n"] * 3 + step) % 31
my_read["l"].append(my_read["n"] * 0.1)
my_text = json.dumps(my_read)
my_table = copy.deepcopy(pickle.loads(my_pickled))
my_table["k"] = (*my_table["k"][-2:], step)
my_pickled = pickle.dumps(my_table)
my_v = my_read["n"] % 8 + sum(my_table["k"]) * 0.1
""",
)
library(
    "running_digest",
    imports="hashlib zlib",
    setup="my_digest, my_crc = hashlib.sha256(b'start'), 0",
    step="""
my_digest.update(bytes([step, int(x) % 256]))
my_crc = zlib.crc32(bytes([step]), my_crc)
my_v = my_digest.digest()[0] % 19 + my_crc % 7
""",
    refusable="a running digest cannot be read",
)
library(
    "running_compression",
    imports="zlib",
    setup="my_packer, my_packed = zlib.compressobj(), []",
    step="""
my_packed.append(my_packer.compress(bytes(str(step) * 40, 'ascii')) + my_packer.flush(zlib.Z_SYNC_FLUSH))
my_v = (sum(my_packed[-1]) + len(my_packed)) % 23
""",
    refusable="a running compression cannot be read",
)
library(
    "running_decompression",
    imports="zlib",
    setup="""
my_source, my_unpacker = zlib.compress(bytes(n * n % 251 for n in range(2000))), zlib.decompressobj()
my_at = 0
""",
    step="""
my_out = my_unpacker.decompress(my_source[my_at : my_at + 25])
my_at += 25
my_v = sum(my_out) % 13 + len(my_out) % 5
""",
    refusable="a running decompression cannot be read",
)
library(
    "database_in_memory",
    imports="sqlite3",
    setup="my_base = sqlite3.connect(':memory:')\nmy_base.execute('create table t (at int, loss real)')",
    step="""
my_base.execute('insert into t values (?, ?)', (step, step % 4 + 0.5))
my_v = my_base.execute('select sum(loss) + count(*) from t').fetchone()[0] % 11
""",
    refusable="its state is in a database",
)
library(
    "cursor_left_open",
    imports="sqlite3",
    setup="""
my_base = sqlite3.connect(":memory:")
my_base.execute("create table t (n int)")
my_base.executemany("insert into t values (?)", [(n * 7 % 23,) for n in range(60)])
my_rows = my_base.execute("select n from t order by rowid")
""",
    step="my_v = next(my_rows)[0] % 9",
    refusable="its state is in a database",
)
library(
    "document_tree",
    imports="xml.etree.ElementTree",
    setup="my_root = xml.etree.ElementTree.Element('run', {'n': '1'})",
    step="""
my_child = xml.etree.ElementTree.SubElement(my_root, "step", {"at": str(step % 4)})
my_child.text = "t" * (step % 3)
my_root.set("n", str(int(my_root.get("n")) * 3 % 37))
my_v = len(my_root.findall("step[@at='1']")) + int(my_root.get("n")) % 7
""",
)
library(
    "writer_into_a_text",
    imports="csv io",
    setup="my_text = io.StringIO()\nmy_writer = csv.DictWriter(my_text, ['a', 'b'])\nmy_writer.writeheader()",
    step="my_writer.writerow({'a': step, 'b': step % 3 * 'x'})\nmy_v = len(my_text.getvalue()) % 11",
    finish="my_text.getvalue()",
)
library(
    "scheduler_of_events",
    imports="sched",
    setup="my_now = [0.0]\nmy_done = []\nmy_events = sched.scheduler(lambda: my_now[0], lambda s: None)",
    step="""
my_events.enter(step % 3 + 1, 1, my_done.append, (step,))
my_now[0] += 1.0
my_events.run(blocking=False)
my_v = len(my_done) + len(my_events.queue) * 0.5
""",
)
library(
    "normal_distribution_and_statistics",
    imports="statistics",
    setup="my_normal, my_seen = statistics.NormalDist(0, 1), [1, 2]",
    step="""
my_seen.append(step * 3 % 7)
my_normal = my_normal * 0.5 + statistics.NormalDist.from_samples(my_seen)
my_v = my_normal.mean + my_normal.stdev + statistics.median(my_seen)
""",
)
library(
    "exit_stack_open",
    imports="contextlib",
    setup="my_log = []\nmy_stack = contextlib.ExitStack()",
    step="""
my_stack.callback(my_log.append, step)
if step % 4 == 3:
    my_stack.close()
my_v = sum(my_log) % 13 + len(my_log) * 0.1
""",
    end="my_stack.close()",
    finish="my_log",
)
library(
    "temporary_files",
    imports="tempfile",
    setup="my_spool = tempfile.SpooledTemporaryFile(max_size=20)\nmy_file = tempfile.TemporaryFile()",
    step="""
my_spool.write(b'%d,' % step)
my_file.write(b'x' * (step % 3))
my_v = my_spool.tell() % 9 + my_file.tell() * 0.5
""",
    end="my_spool.close()\nmy_file.close()",
    refusable="its state is in a file that has no name",
)
library(
    "replaced_standard_output",
    imports="contextlib io",
    setup="my_text = io.StringIO()",
    step="""
with contextlib.redirect_stdout(my_text):
    print('seen', step % 4)
my_v = len(my_text.getvalue()) % 13
""",
)
library(
    "attributes_of_many_small_objects",
    imports="types",
    top="class MyRow:\n    def __init__(self, n):\n        self.n, self.tags = n, {'k': n % 3}\n",
    setup="my_rows = [MyRow(n) for n in range(40)]\nmy_index = {row.n: row for row in my_rows}",
    step="""
my_row = my_index[step * 7 % 40]
my_row.tags['k'] += step
my_rows.append(MyRow(step))
my_v = sum(row.tags['k'] for row in my_rows) % 23
""",
)
library(
    "progress_bar",
    imports="tqdm os",
    needs="tqdm",
    setup="my_bar = tqdm.tqdm(total=500, file=open(os.devnull, 'w'), mininterval=1e9)",
    step="my_bar.update(step % 3 + 1)\nmy_v = my_bar.n % 9",
    weight=0.5,
)
library(
    "settings_in_yaml",
    imports="yaml",
    needs="yaml",
    setup="my_text = 'n: 1\\nl: [1, 2]\\n'",
    step="""
my_read = yaml.safe_load(my_text)
my_read['n'] = my_read['n'] * 3 % 19 + step % 2
my_text = yaml.safe_dump(my_read)
my_v = my_read['n']
""",
    weight=0.5,
)
