// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/tests/cuda/driver_claims.h>
#include <weft/tests/harness/fake_driver.h>

namespace weft::cuda {
namespace {

std::weak_ptr<harness::FakeDriver> last_opened;

class FakeGraphs final : public Graphs {
 public:
  CUresult begin(const StreamRef& stream) override { return fake_->begin_capture(stream); }
  CUresult end(const StreamRef& stream) override { return fake_->end_capture(stream, graph_); }
  CUresult launch(const StreamRef& stream) override { return fake_->launch(graph_, stream); }
  void forgive() override { fake_->take_complaints(); }

 private:
  std::shared_ptr<harness::FakeDriver> fake_ = last_opened.lock();
  harness::FakeDriver::Graph graph_;
};

std::unique_ptr<Graphs> fake_graphs() { return std::make_unique<FakeGraphs>(); }

// The fake is destroyed with the last user of its table, and then reports its complaints.
Result<std::shared_ptr<const Driver>> open_fake() {
  auto fake = std::make_shared<harness::FakeDriver>(harness::FakeDriver::Options{.threads = true});
  fake->define_kernel<std::uint32_t*, std::uint32_t, std::uint32_t>(
      "fill_words", [](std::uint32_t* to, std::uint32_t value, std::uint32_t count) {
        std::fill_n(to, count, value);
      });
  last_opened = fake;
  const Driver* const table = fake->driver().get();
  return std::shared_ptr<const Driver>(std::move(fake), table);
}

INSTANTIATE_TEST_SUITE_P(Fake, DriverClaims,
                         testing::Values(DriverSource{"threads", &open_fake, &fake_graphs}));

}  // namespace
}  // namespace weft::cuda
