// SPDX-License-Identifier: Apache-2.0
// What a timeline shows of a cuda_ipc connection.
#include <weft/profiling/trace/trace.h>
#include <weft/tests/harness/device_timeline.h>
#include <weft/tests/transport/cuda_ipc/lanes.h>

namespace weft::transport::cuda_ipc {
namespace {

class CudaIpcInATimeline : public Lanes {};

TEST_F(CudaIpcInATimeline, CopyIsASpanWithAnArrowFromAccept) {
  constinit static trace::Name accepting{trace::Layer::User, "accept"};
  open();
  receive();
  const auto from = shareable(5000, 1), to = shareable(3000);
  harness::DeviceTimeline timeline;
  const Op sent = near->send({}, std::array{from->slice().part(11, 3000)}, from, {});
  next();
  {
    const trace::Range range(accepting);
    expect_good(far->accept(std::array{to->slice()}, to, {}));
  }
  expect_good(sent);
  std::vector<std::byte> on_host(3000);
  near->send({}, std::array{from->slice().part(0, 3000)}, from, {});
  next();
  expect_good(far->accept(std::array{slice_of(on_host)}, nullptr, {}));
  EXPECT_THAT(timeline.names(2),
              testing::ElementsAre("copy: 3000 bytes", "copy to host: 3000 bytes"));
  EXPECT_THAT(timeline.arrows(), testing::ElementsAre("accept > enqueue copies -> copy",
                                                      "enqueue copies -> copy to host"));
}

}  // namespace
}  // namespace weft::transport::cuda_ipc
