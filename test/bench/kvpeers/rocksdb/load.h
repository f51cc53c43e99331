// The load of ../run.go, for an engine that is not written in Go: the same keys, values, order of objects, verification
// and timing. vector.cc prints the sequence, which a test compares with that of Go.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "values are little endian");

namespace load {

constexpr size_t kKeyBytes = 16;
// kRun is how many objects, or versions, a worker takes at a time.
constexpr uint64_t kRun = 64;

struct Config {
  uint64_t objects = 0;
  size_t value_bytes = 0;
  uint64_t workers = 0;
  uint64_t seed = 0;
};

// Mix is SplitMix64's finaliser: a bijection that spreads every bit.
inline uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

inline void PutKey(std::string* key, uint64_t index) {
  const uint64_t x = Mix(index);
  const uint64_t halves[2] = {__builtin_bswap64(x), __builtin_bswap64(Mix(x))};
  key->assign(reinterpret_cast<const char*>(halves), kKeyBytes);
}

// PutValue fills all of b.
inline void PutValue(std::string* b, uint64_t index, uint64_t version) {
  char* p = b->data();
  std::memcpy(p, &index, 8);
  std::memcpy(p + 8, &version, 8);
  uint64_t x = Mix(index) ^ version;
  size_t at = 16;
  for (; at + 8 <= b->size(); at += 8) {
    x = Mix(x);
    std::memcpy(p + at, &x, 8);
  }
  for (; at < b->size(); at++) p[at] = static_cast<char>(x >> (at % 8 * 8));
}

// CheckValue says what is wrong with an object's value, if it is none of those that were put.
inline std::string CheckValue(const std::string& b, std::string* scratch, uint64_t index) {
  const std::string object = "object " + std::to_string(index);
  if (b.size() != scratch->size()) return object + ": the value has " + std::to_string(b.size()) + " bytes";
  uint64_t version;
  std::memcpy(&version, b.data() + 8, 8);
  PutValue(scratch, index, version);
  return b == *scratch ? "" : object + ": the value is not what was put";
}

// Histogram counts latencies by 128 steps for each power of two, which is as fine as the histograms of ../run.go.
class Histogram {
 public:
  void Record(uint64_t ns) { counts_[Bucket(std::min(ns, kMaxNS))]++; }

  void AddTo(std::map<uint64_t, uint64_t>* counts_by_ns) const {
    for (size_t i = 0; i < kBuckets; i++) {
      if (counts_[i] > 0) (*counts_by_ns)[Middle(i)] += counts_[i];
    }
  }

 private:
  static constexpr uint64_t kMaxNS = 60'000'000'000;
  static constexpr int kStepBits = 7;
  static constexpr size_t kBuckets = (36 - kStepBits + 1) << kStepBits;  // kMaxNS has 36 bits

  static size_t Bucket(uint64_t ns) {
    int shift = 0;
    while (ns >> shift >= 2 << kStepBits) shift++;
    return (static_cast<size_t>(shift) << kStepBits) + (ns >> shift);
  }
  static uint64_t Middle(size_t bucket) {
    const size_t steps = size_t{1} << kStepBits;
    if (bucket < 2 * steps) return bucket;
    const size_t shift = (bucket >> kStepBits) - 1;
    return ((steps + bucket % steps) << shift) + ((uint64_t{1} << shift) >> 1);
  }

  std::array<uint32_t, kBuckets> counts_{};
};

enum class Phase { kLoad, kGet, kPut };

// Op is one GET or PUT. value is what to PUT, or what a GET has returned.
struct Op {
  uint64_t index = 0;
  std::string key, value;
  std::chrono::steady_clock::time_point begun;
};

// Crowd is what the workers of a phase share.
struct Crowd {
  Config config;
  Phase phase;
  std::atomic<uint64_t> next{0};     // object to load
  std::atomic<uint64_t> version{0};  // of the next values
  std::atomic<bool> stop{false};

  std::mutex mu;
  std::map<uint64_t, uint64_t> counts_by_ns;
  uint64_t checked = 0;
  std::string error;

  Crowd(const Config& c, Phase p) : config(c), phase(p) {}
};

// Worker does one operation after the other.
class Worker {
 public:
  Worker(Crowd* crowd, uint64_t number)
      : crowd_(*crowd),
        random_(Mix(crowd->config.seed) ^ Mix((number << 1) | 1)),
        scratch_(crowd->config.value_bytes, 0) {}

  // Begin fills in the next operation, if there is one.
  bool Begin(Op* op) {
    if (!error_.empty() || crowd_.stop.load(std::memory_order_relaxed)) return false;
    if (crowd_.phase == Phase::kLoad) {
      if (from_ == to_) {
        from_ = crowd_.next.fetch_add(kRun);
        to_ = std::min(from_ + kRun, crowd_.config.objects);
      }
      if (from_ >= to_) {
        from_ = to_;
        return false;
      }
      op->index = from_++;
    } else {
      random_ = Mix(random_);
      op->index = random_ % crowd_.config.objects;
    }
    op->value.resize(crowd_.config.value_bytes);
    PutKey(&op->key, op->index);
    if (crowd_.phase != Phase::kGet) {
      uint64_t v = 0;
      if (crowd_.phase == Phase::kPut) {
        if (version_ == version_to_) {
          version_to_ = crowd_.version.fetch_add(kRun) + kRun;
          version_ = version_to_ - kRun;
        }
        v = ++version_;
      }
      PutValue(&op->value, op->index, v);
    }
    op->begun = std::chrono::steady_clock::now();
    return true;
  }

  // End takes the answer; error is empty if there is none.
  void End(const Op& op, const std::string& error) {
    const auto took = std::chrono::steady_clock::now() - op.begun;
    latencies_.Record(std::chrono::duration_cast<std::chrono::nanoseconds>(took).count());
    error_ = error;
    if (error_.empty() && crowd_.phase == Phase::kGet) {
      error_ = CheckValue(op.value, &scratch_, op.index);
      checked_++;
    }
    if (!error_.empty()) crowd_.stop = true;
  }

  // Leave adds what the worker has counted to the crowd's.
  void Leave() {
    std::lock_guard<std::mutex> lock(crowd_.mu);
    latencies_.AddTo(&crowd_.counts_by_ns);
    crowd_.checked += checked_;
    if (crowd_.error.empty()) crowd_.error = error_;
  }

 private:
  Crowd& crowd_;
  uint64_t random_;
  uint64_t from_ = 0, to_ = 0;  // objects to load
  uint64_t version_ = 0, version_to_ = 0;
  uint64_t checked_ = 0;
  std::string scratch_, error_;
  Histogram latencies_;
};

// Run drives a store with as many threads as there are workers, until nothing is left to load, or for so long.
// Store has Get and Put of (key, value), which return an error or "".
template <typename Store>
void Run(Store* store, Crowd* crowd, std::chrono::milliseconds time) {
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < crowd->config.workers; i++) {
    threads.emplace_back([store, crowd, i] {
      Worker worker(crowd, i);
      Op op;
      while (worker.Begin(&op)) {
        const bool get = crowd->phase == Phase::kGet;
        worker.End(op, get ? store->Get(op.key, &op.value) : store->Put(op.key, op.value));
      }
      worker.Leave();
    });
  }
  if (crowd->phase != Phase::kLoad) {
    const auto end = std::chrono::steady_clock::now() + time;
    while (!crowd->stop && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    crowd->stop = true;
  }
  for (auto& t : threads) t.join();
}

}  // namespace load
