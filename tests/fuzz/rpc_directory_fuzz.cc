// SPDX-License-Identifier: Apache-2.0
// All workers write their records into the job's store. For any contents of the store, a worker
// that joins or looks for others gets an Error, or records that can be used. The first byte says
// whether the number of workers is fixed, the second how long the text is that stands for a
// worker's rank; the remaining bytes are the record of each worker.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include <weft/base/error.h>
#include <weft/engine/call/directory.h>

namespace {

using namespace weft;
using namespace weft::call;

class HostileStore final : public transport::Bootstrap {
 public:
  HostileStore(Bytes rank, Bytes record) : rank_(std::move(rank)), record_(std::move(record)) {}
  void set(const std::string&, const Bytes&) override {}
  void erase(const std::string&) override {}
  bool exists(const std::string&) override { return true; }
  // Every second claim fails, as if another worker had been faster.
  bool compare_set(const std::string&, const Bytes&, const Bytes&) override {
    return ++claims_ % 2 == 0;
  }
  Bytes get(const std::string& key, Deadline) override {
    return key.starts_with("worker/") ? record_ : rank_;
  }
  // As if this worker were the first of its rank and name, and others had joined.
  long add(const std::string& key, long) override {
    if (key.starts_with("kind/")) return 0;
    return key == "read" ? 2 : 1;
  }

 private:
  const Bytes rank_;
  const Bytes record_;
  int claims_ = 0;
};

template <class Call>
void allow_errors(Call call) {
  try {
    call();
  } catch (const Error&) {  // anything else ends the program
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  if (bytes < 2) return 0;
  const auto input = std::as_bytes(std::span(data + 2, bytes - 2));
  const auto rank = input.first(std::min<std::size_t>(data[1], input.size()));
  const auto record = input.subspan(rank.size());
  const auto store =
      std::make_shared<HostileStore>(transport::Bootstrap::Bytes(rank.begin(), rank.end()),
                                     transport::Bootstrap::Bytes(record.begin(), record.end()));
  const auto size = data[0] % 2 == 0 ? std::optional<int>() : 2;
  Directory directory(store, {"self", 0}, size, {});
  allow_errors([&] { directory.join({}, {}, Deadline::in(std::chrono::seconds(1))); });
  allow_errors([&] { directory.workers(); });
  allow_errors([&] { directory.recipient("worker1"); });
  allow_errors([&] { directory.recipient(WorkerInfo{"worker1", 1}); });
  allow_errors([&] { directory.find(1); });
  allow_errors([&] { directory.gpus(); });
  return 0;
}
