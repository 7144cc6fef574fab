"""Side effects: files that the loop writes, reads again, moves and counts. What is on the disk in the end is part of what is compared."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

effect = partial(feature, __name__)

effect(
    "line_appended_each_step",
    setup="my_total = 0",
    step="""
my_total += step % 4
with open('my_log.csv', 'a') as my_file:
    my_file.write(f'{step},{my_total}\\n')
my_v = my_total % 7
""",
)
effect(
    "file_open_from_before_the_loop",
    setup="my_file = open('my_open.txt', 'w')",
    step="my_file.write(f'{step} {x!r}\\n')\nmy_v = my_file.tell() % 11",
    end="my_file.close()",
)
effect(
    "file_open_and_flushed",
    setup="my_file, my_n = open('my_flushed.txt', 'w', buffering=1), 0",
    step="my_n = my_n * 3 % 37 + step % 2\nprint(step, my_n, file=my_file, flush=True)\nmy_v = my_n",
    end="my_file.close()",
)
effect(
    "csv_writer_kept_open",
    imports="csv",
    setup="my_file = open('my_rows.csv', 'w', newline='')\nmy_rows, my_written = csv.writer(my_file), 0",
    step="""
my_written += my_rows.writerow([step, step % 3 * 'x', x])
if step % 4 == 0:
    my_file.flush()
my_v = my_written % 13
""",
    end="my_file.close()",
)
effect(
    "file_written_anew_each_step",
    setup="my_best = 50.0",
    step="""
my_best = my_best * 0.9 + step % 3
with open('my_best.txt', 'w') as my_file:
    my_file.write(repr(my_best))
my_v = my_best % 5
""",
)
effect(
    "file_read_and_written_each_step",
    imports="os",
    setup="with open('my_state.txt', 'w') as my_file:\n    my_file.write('1')",
    step="""
with open("my_state.txt") as my_file:
    my_n = int(my_file.read())
with open("my_state.txt", "w") as my_file:
    my_file.write(str((my_n * 3 + step) % 61))
my_v = my_n % 9
""",
    refusable="it reads a file that it wrote over",
)
effect(
    "file_found_from_an_earlier_start",
    imports="os",
    setup="my_n = 1\nif os.path.exists('my_again.txt'):\n    my_n = 1000\nopen('my_again.txt', 'w').close()",
    step="my_n = my_n * 5 % 7919\nmy_v = my_n % 9",
    reset="my_n = 1",
    refusable="it begins otherwise when its file is there",
)
effect(
    "json_read_changed_and_replaced",
    imports="json os",
    setup="with open('my_table.json', 'w') as my_file:\n    json.dump({'n': 1, 'seen': []}, my_file)",
    step="""
with open("my_table.json") as my_file:
    my_table = json.load(my_file)
my_table["seen"].append(step)
my_table["n"] = (my_table["n"] * 3 + len(my_table["seen"])) % 43
with open("my_table.tmp", "w") as my_file:
    json.dump(my_table, my_file)
os.replace("my_table.tmp", "my_table.json")
my_v = my_table["n"] % 11
""",
    refusable="it reads a file that it wrote over",
)
effect(
    "appended_and_read_again",
    setup="open('my_lines.txt', 'w').close()",
    step="""
with open('my_lines.txt', 'a+') as my_file:
    my_file.write(str(step % 4) + '\\n')
    my_file.seek(0)
    my_v = sum(map(int, my_file)) % 11
""",
    refusable="it reads what it appended",
)
effect(
    "record_changed_in_place",
    imports="struct",
    setup="""
with open('my_cells.bin', 'wb') as my_file:
    my_file.write(bytes(32))
my_file = open('my_cells.bin', 'r+b', buffering=0)
""",
    step="""
my_file.seek(step * 3 % 4 * 8)
my_n = struct.unpack("<q", my_file.read(8))[0]
my_file.seek(-8, 1)
my_file.write(struct.pack("<q", my_n * 2 + step + 1))
my_v = my_n % 13
""",
    end="my_file.close()",
    refusable="it reads a file that it wrote over",
)
effect(
    "renamed_each_step",
    imports="os",
    setup="my_name = 'my_file_0.txt'\nwith open(my_name, 'w') as my_file:\n    my_file.write('start')",
    step="""
my_n = int(my_name[:-4].rpartition('_')[2]) + step % 3 + 1
my_next = f'my_file_{my_n}.txt'
os.rename(my_name, my_next)
my_name = my_next
my_v = my_n % 9
""",
    refusable="it renames a file in each step",
)
effect(
    "folder_made_each_step",
    imports="os",
    setup="my_made = 0",
    step="""
os.makedirs(f'my_runs/{step % 5}/{step}')
my_made += 1
with open(f'my_runs/{step % 5}/{step}/n.txt', 'w') as my_file:
    my_file.write(str(my_made))
my_v = my_made % 9
""",
    refusable="it makes a folder that must not be there",
)
effect(
    "folder_made_if_missing",
    imports="os",
    setup="my_n = 0.5",
    step="""
os.makedirs(f'my_safe/{step % 4}', exist_ok=True)
my_n = my_n * 0.75 + step % 3
with open(f'my_safe/{step % 4}/last.txt', 'w') as my_file:
    my_file.write(f'{my_n!r}')
my_v = my_n
""",
)
effect(
    "checkpoints_of_which_three_are_kept",
    imports="os numpy",
    setup="my_kept = []",
    step="""
my_path = f"my_ckpt_{step}.npy"
numpy.save(my_path, numpy.full(3, x))
my_kept.append(my_path)
if len(my_kept) > 3:
    os.remove(my_kept.pop(0))
my_v = len(my_kept) + len(my_kept[0]) * 0.5
""",
    refusable="it removes files in the loop",
)
effect(
    "own_checkpoint_loaded_again",
    imports="os pickle",
    setup="my_level = {'n': 1}",
    step="""
my_level["n"] = my_level["n"] * 3 % 59
if step % 4 == 1:
    with open("my_ckpt.pkl", "wb") as my_file:
        pickle.dump(my_level, my_file)
if step % 6 == 5 and os.path.exists("my_ckpt.pkl"):
    with open("my_ckpt.pkl", "rb") as my_file:
        my_level = pickle.load(my_file)
my_v = my_level["n"] % 10
""",
    refusable="it reads a file that it wrote over",
)
effect(
    "new_file_each_step",
    setup="my_n = 3",
    step="""
my_n = my_n * 5 % 67
with open(f'my_out_{step:03}.txt', 'x') as my_file:
    my_file.write(str(my_n))
my_v = my_n % 7
""",
    refusable="it makes files that must not be there",
)
effect(
    "counted_by_what_lies_there",
    imports="glob os",
    step="""
with open(f'my_item_{step}.tmp', 'w') as my_file:
    my_file.write('x' * step)
my_v = len(glob.glob('my_item_*.tmp')) % 9 + 0.5
""",
    reset="for my_old in glob.glob('my_item_*.tmp'):\n    os.remove(my_old)",
    refusable="it counts the files that it wrote",
)
effect(
    "numbered_after_the_last_file",
    imports="os",
    setup="my_seen = 0",
    step="""
my_n = 0
while os.path.exists(f"my_part.{my_n}"):
    my_n += 1
with open(f"my_part.{my_n}", "w") as my_file:
    my_file.write(str(step))
my_seen += 1
my_v = my_n % 6 + my_seen * 0.1
""",
    refusable="it counts the files that it wrote",
)
effect(
    "printed_each_step",
    setup="my_total = 1",
    step="my_total = my_total * 3 % 47\nprint('step', step, 'total', my_total)\nmy_v = my_total % 9",
    weight=2.0,
)
effect(
    "printed_in_pieces",
    imports="sys",
    setup="my_width = 0",
    step="""
sys.stdout.write('.' * (step % 3 + 1))
my_width += step % 3 + 1
if my_width > 9:
    print(flush=True)
    my_width = 0
my_v = my_width * 0.5
""",
    end="print()",
)
effect(
    "printed_by_the_system",
    imports="os sys",
    setup="my_n = 1",
    step="sys.stdout.flush()\nos.write(1, b'raw %d\\n' % my_n)\nmy_n = my_n * 3 % 23\nmy_v = my_n",
)
effect(
    "writer_thread",
    imports="threading queue",
    top="""
class MyWriter:
    def __init__(self, path):
        self.queue, self.count = queue.Queue(), 0
        self.file = open(path, "w")
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while (line := self.queue.get()) is not None:
            self.file.write(line)
            self.file.flush()

    def add(self, line):
        self.count += 1
        self.queue.put(line)

    def close(self):
        self.queue.put(None)
        self.thread.join()
        self.file.close()
""",
    setup="my_writer = MyWriter('my_events.txt')",
    step="my_writer.add(f'{step} {x!r}\\n')\nmy_v = my_writer.count % 5",
    end="my_writer.close()",
    refusable="a thread of its own writes a file",
    weight=0.6,
)
effect(
    "log_file_of_a_handler",
    imports="logging",
    setup="""
my_logger = logging.Logger("my_run")
my_handler = logging.FileHandler("my_run.log", mode="«w|a»")
my_handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
my_logger.addHandler(my_handler)
my_n = 0
""",
    step="my_n += step % 3\nmy_logger.info('at %d: %d', step, my_n)\nmy_v = my_n % 8",
    end="my_handler.close()",
)
effect(
    "log_files_that_rotate",
    imports="logging.handlers",
    setup="""
my_logger = logging.Logger("my_turns")
my_handler = logging.handlers.RotatingFileHandler("my_turns.log", maxBytes=60, backupCount=3)
my_logger.addHandler(my_handler)
my_n = 0
""",
    step="my_n += step % 4\nmy_logger.info('step %d has %d', step, my_n)\nmy_v = my_n % 8",
    end="my_handler.close()",
    refusable="it renames files in the loop",
)
effect(
    "compressed_log",
    imports="gzip",
    setup="my_file = gzip.GzipFile('my_log.gz', 'wb', mtime=0)\nmy_n = 0",
    step="my_n += my_file.write(b'%d;' % step)\nmy_v = my_n % 11",
    end="my_file.close()",
    refusable="it writes through a running compression",
)
effect(
    "archive_that_grows",
    refusable="it writes through an archive",
    imports="zipfile",
    setup="my_zip = zipfile.ZipFile('my_all.zip', 'w')\nmy_n = 0",
    step="""
my_zip.writestr(zipfile.ZipInfo(f'{step}.txt', (2024, 1, 1, 0, 0, 0)), str(my_n))
my_n += len(my_zip.namelist())
my_v = my_n % 9
""",
    end="my_zip.close()",
)
effect(
    "database_file",
    imports="sqlite3 os",
    setup="""
my_base = sqlite3.connect('my_runs.db', isolation_level=None)
my_base.execute('create table if not exists t (at int, n int)')
""",
    step="""
my_base.execute('insert into t values (?, ?)', (step, step % 4))
my_v = my_base.execute('select sum(n) + count(*) from t').fetchone()[0] % 9
""",
    end="my_rows = my_base.execute('select * from t').fetchall()\nmy_base.close()\nos.remove('my_runs.db')",
    finish="my_rows",
    reset="my_base.execute('delete from t')",
    refusable="its state is in a database",
)
effect(
    "shelf",
    imports="shelve dbm.dumb glob os",
    setup="my_shelf = shelve.Shelf(dbm.dumb.open('my_shelf', 'n'))\nmy_shelf['n'] = 1",
    step="""
my_shelf['n'] = my_shelf['n'] * 3 % 53 + step % 2
my_shelf[str(step % 5)] = step
my_v = my_shelf['n'] % 9 + len(my_shelf) * 0.1
""",
    end="my_shelf.close()\nfor my_path in glob.glob('my_shelf.*'):\n    os.remove(my_path)",
    refusable="its state is in a database",
)
effect(
    "file_descriptor_of_the_system",
    imports="os",
    setup="my_fd = os.open('my_raw.bin', os.O_RDWR | os.O_CREAT | os.O_TRUNC)",
    step="""
os.write(my_fd, b'%03d' % step)
my_v = os.lseek(my_fd, 0, os.SEEK_CUR) % 7 + os.fstat(my_fd).st_size * 0.1
""",
    end="os.close(my_fd)",
    refusable="it writes by a number of the system",
)
effect(
    "file_cut_short",
    refusable="it cuts a file short that it wrote",
    setup="my_file = open('my_cut.txt', 'w+')",
    step="""
my_file.write('ab' * (step % 3 + 1))
if step % 5 == 4:
    my_file.truncate(3)
    my_file.seek(0, 2)
my_v = my_file.tell() % 8
""",
    end="my_file.close()",
)
effect(
    "link_to_the_latest",
    imports="os",
    setup="my_n = 0",
    step="""
my_n += step % 3
with open(f"my_v{my_n}.txt", "w") as my_file:
    my_file.write(str(step))
if os.path.islink("my_latest"):
    os.remove("my_latest")
os.symlink(f"my_v{my_n}.txt", "my_latest")
my_v = my_n % 7
""",
    refusable="it removes files in the loop",
)
effect(
    "child_that_appends",
    imports="subprocess",
    setup="my_n = 0",
    step="""
my_n += step % 4
if step % 3 == 0:
    subprocess.run(['sh', '-c', f'echo {my_n} >> my_child.txt'], check=True)
my_v = my_n % 11
""",
    refusable="a process that it starts writes a file",
    weight=0.4,
)
effect(
    "opened_late_and_closed_early",
    setup="my_file, my_n = None, 0",
    step="""
if step % 5 == 1:
    my_file = open(f"my_phase_{step // 5}.txt", "w")
if my_file is not None:
    my_n += my_file.write(f"{step};")
if step % 5 == 3:
    my_file.close()
    my_file = None
my_v = my_n % 9
""",
    end="if my_file is not None:\n    my_file.close()",
    reset="my_n = 50",
)
effect(
    "two_writers_of_one_file",
    setup="my_a = open('my_both.txt', 'a')\nmy_b = open('my_both.txt', 'a')\nmy_n = 0",
    step="""
my_n += (my_a if step % 2 else my_b).write(f'{step},')
(my_a if step % 2 else my_b).flush()
my_v = my_n % 9
""",
    end="my_a.close()\nmy_b.close()",
)
