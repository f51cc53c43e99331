// Prints the beginning of the load of two workers in each phase, for values of three lengths. ../testdata/load.txt holds
// what it must print, which a test also makes with ../run.go.
#include <cstdio>

#include "load.h"

static void Hex(const std::string& bytes) {
  std::putchar(' ');
  for (unsigned char c : bytes) std::printf("%02x", c);
}

int main() {
  const std::pair<const char*, load::Phase> phases[] = {
      {"load", load::Phase::kLoad}, {"get", load::Phase::kGet}, {"put", load::Phase::kPut}};
  for (size_t value_bytes : {24, 29, 40}) {
    for (const auto& [name, phase] : phases) {
      // Two runs of objects, the second of which is short.
      load::Crowd crowd({load::kRun + 3, value_bytes, 2, 7}, phase);
      for (int number = 0; number < 2; number++) {
        load::Worker worker(&crowd, number);
        load::Op op;
        for (uint64_t n = 0; n <= load::kRun && worker.Begin(&op); n++) {
          if (n >= 2 && n < load::kRun - 1) continue;
          std::printf("%s %d %llu", name, number, static_cast<unsigned long long>(op.index));
          Hex(op.key);
          if (phase != load::Phase::kGet) Hex(op.value);
          std::putchar('\n');
        }
      }
    }
  }
}
