// RocksDB as an engine of kvpeers, in a process of its own. It reads commands from stdin, one a line, and answers each
// with a line that begins with "ok" or "error":
//
//   open DURABLE              create or open the store; DURABLE 1: PUTs are synced
//   load                      load all objects        -> ok CHECKED [NS COUNT]...
//   get|put MILLISECONDS      a phase of GETs or PUTs -> the same: the latencies and how often each was
//   one-get KEY               one GET of a key in hexadecimal digits -> ok VALUE
//   one-put KEY VALUE         one PUT
//   settled                   -> ok 1 if no compaction or flush runs or waits
//   close                     flush and close
//
// It ends with its stdin. Arguments: directory, objects, bytes of a value, workers, seed, bytes of memory for the block
// cache and the memtables, and 1 for direct I/O.
#if !__has_include(<rocksdb/db.h>)
#error "RocksDB is missing: apt-get install librocksdb-dev"
#endif

#include <malloc.h>
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/table.h>

#include <iostream>
#include <memory>
#include <sstream>

#include "load.h"

namespace {

struct Arguments {
  std::string dir;
  load::Config load;
  uint64_t memory_bytes = 0;
  bool direct = false;
};

rocksdb::Options MakeOptions(const Arguments& args) {
  rocksdb::Options o;
  o.create_if_missing = true;
  o.compression = rocksdb::kNoCompression;  // the values do not compress
  o.use_direct_reads = args.direct;
  o.use_direct_io_for_flush_and_compaction = args.direct;
  o.max_background_jobs = 2;
  o.info_log_level = rocksdb::FATAL_LEVEL;
  o.stats_dump_period_sec = 0;
  o.stats_persist_period_sec = 0;
  o.compaction_readahead_size = 256 << 10;  // for each input table; 2 MiB with direct I/O by default
  o.recycle_log_file_num = 2;  // syncs of a log whose blocks exist need no commit of the file system's journal

  // Two memtables of an eighth each, the rest is block cache: as for Pebble.
  o.write_buffer_size = std::clamp<uint64_t>(args.memory_bytes / 8, 1 << 20, 64 << 20);
  o.max_write_buffer_number = 2;
  o.level_compaction_dynamic_level_bytes = true;
  // The first level is as large as the four memtables of level 0 that are merged into it, and in tables of that size:
  // with RocksDB's defaults, which are for larger memtables, loading wrote 14.6 bytes per user byte instead of 8.2.
  o.max_bytes_for_level_base = 4 * o.write_buffer_size;
  o.target_file_size_base = std::min<uint64_t>(o.max_bytes_for_level_base, 8 << 20);

  rocksdb::BlockBasedTableOptions t;
  const uint64_t memtables = 2 * o.write_buffer_size;
  const uint64_t cache_bytes = std::max<uint64_t>(args.memory_bytes - std::min(args.memory_bytes, memtables), 1 << 20);
  // A shard holds the largest index or filter of a table many times.
  t.block_cache = rocksdb::NewLRUCache(cache_bytes, 2);
  t.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  // Indices and filters stay within the budget.
  t.cache_index_and_filter_blocks = true;
  t.cache_index_and_filter_blocks_with_high_priority = true;
  t.pin_l0_filter_and_index_blocks_in_cache = true;
  t.format_version = 5;
  o.table_factory.reset(rocksdb::NewBlockBasedTableFactory(t));
  return o;
}

// Store is the open database.
class Store {
 public:
  explicit Store(const Arguments& args) : args_(args) {}

  std::string Open(bool durable) {
    write_.sync = durable;
    rocksdb::DB* db = nullptr;
    const rocksdb::Status s = rocksdb::DB::Open(MakeOptions(args_), args_.dir, &db);
    db_.reset(db);
    return Error(s);
  }

  std::string Get(const std::string& key, std::string* value) {
    rocksdb::PinnableSlice found;
    const rocksdb::Status s = db_->Get(rocksdb::ReadOptions(), db_->DefaultColumnFamily(), key, &found);
    if (s.ok()) value->assign(found.data(), found.size());
    return Error(s);
  }

  std::string Put(const std::string& key, const std::string& value) { return Error(db_->Put(write_, key, value)); }

  bool Settled() {
    for (const char* name : {"rocksdb.num-running-compactions", "rocksdb.num-running-flushes",
                             "rocksdb.compaction-pending", "rocksdb.mem-table-flush-pending"}) {
      uint64_t n = 1;
      if (!db_->GetIntProperty(name, &n) || n > 0) return false;
    }
    return true;
  }

  std::string Close() {
    rocksdb::Status s = db_->Flush(rocksdb::FlushOptions());
    if (s.ok()) s = db_->Close();
    db_.reset();
    return Error(s);
  }

  bool IsOpen() const { return db_ != nullptr; }

 private:
  static std::string Error(const rocksdb::Status& s) { return s.ok() ? "" : s.ToString(); }

  const Arguments args_;
  rocksdb::WriteOptions write_;
  std::unique_ptr<rocksdb::DB> db_;
};

// Bytes reads hexadecimal digits.
std::string Bytes(const std::string& digits) {
  std::string out;
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    out.push_back(static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  return out;
}

std::string Digits(const std::string& bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string out;
  for (unsigned char c : bytes) {
    out.push_back(digits[c >> 4]);
    out.push_back(digits[c & 15]);
  }
  return out;
}

std::string RunPhase(Store* store, const Arguments& args, load::Phase phase, int64_t milliseconds, std::ostream* out) {
  load::Crowd crowd(args.load, phase);
  load::Run(store, &crowd, std::chrono::milliseconds(milliseconds));
  *out << ' ' << crowd.checked;
  for (const auto& [ns, count] : crowd.counts_by_ns) *out << ' ' << ns << ' ' << count;
  return crowd.error;
}

// Do carries out a command and writes what follows "ok". It returns an error or "".
std::string Do(Store* store, const Arguments& args, const std::string& line, std::ostream* out) {
  std::istringstream in(line);
  std::string command, key, value;
  int64_t number = 0;
  in >> command;
  if (command == "open") {
    in >> number;
    return store->Open(number != 0);
  }
  if (!store->IsOpen()) return "the store is not open";
  if (command == "load") return RunPhase(store, args, load::Phase::kLoad, 0, out);
  if (command == "get" || command == "put") {
    if (!(in >> number)) return "want a number of milliseconds";
    return RunPhase(store, args, command == "get" ? load::Phase::kGet : load::Phase::kPut, number, out);
  }
  if (command == "one-get") {
    in >> key;
    const std::string error = store->Get(Bytes(key), &value);
    *out << ' ' << Digits(value);
    return error;
  }
  if (command == "one-put") {
    in >> key >> value;
    return store->Put(Bytes(key), Bytes(value));
  }
  if (command == "settled") {
    *out << ' ' << store->Settled();
    return "";
  }
  if (command == "close") return store->Close();
  return "there is no command " + command;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    std::cerr << "want DIRECTORY OBJECTS VALUE-BYTES WORKERS SEED MEMORY-BYTES DIRECT\n";
    return 2;
  }
  // One heap for each of 64 threads would take as much memory as the caches.
  mallopt(M_ARENA_MAX, 2);
  Arguments args;
  args.dir = argv[1];
  args.load.objects = std::stoull(argv[2]);
  args.load.value_bytes = std::stoull(argv[3]);
  args.load.workers = std::stoull(argv[4]);
  args.load.seed = std::stoull(argv[5]);
  args.memory_bytes = std::stoull(argv[6]);
  args.direct = std::string(argv[7]) == "1";
  Store store(args);
  std::string line;
  while (std::getline(std::cin, line)) {
    std::ostringstream out;
    const std::string error = Do(&store, args, line, &out);
    if (error.empty()) {
      std::cout << "ok" << out.str() << std::endl;
    } else {
      std::cout << "error " << error << std::endl;
    }
  }
}
