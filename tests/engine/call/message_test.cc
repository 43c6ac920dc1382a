// SPDX-License-Identifier: Apache-2.0
// Whole messages over a connection: which bytes are sent, and which are copied before.
#include <optional>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <weft/engine/call/message.h>
#include <weft/engine/call/pending.h>
#include <weft/engine/codec/values.h>
#include <weft/transport/routes.h>

namespace weft::call {
namespace {

codec::Encoded encoded(const std::vector<at::Tensor>& tensors,
                       const std::string& text = "payload") {
  return codec::Writer().write([&](codec::Packer& packer) {
    packer.pack_array(2);
    packer.pack(text);
    packer.pack(tensors);
  });
}

// A call's number belongs to one connection; only the peer at its other end may answer.
TEST(PendingCalls, AreTakenOnlyByTheirConnection) {
  PendingCalls calls;
  Promise<int> promise;
  WaitingCall call;
  call.pending = std::make_unique<PendingResult<int>>(promise);
  call.to = 1;
  call.connection_number = 2;
  calls.add(7, std::move(call));
  EXPECT_EQ(calls.take_of(7, 2, 2).pending, nullptr);
  EXPECT_EQ(calls.take_of(7, 1, 1).pending, nullptr);
  EXPECT_EQ(calls.size(), 1U);
  EXPECT_NE(calls.take_of(7, 1, 2).pending, nullptr);
  EXPECT_EQ(calls.size(), 0U);
}

// Both ends of a connection in this process.
class MessageLane : public testing::Test {
 protected:
  void SetUp() override {
    const auto offers = routes.listen(
        {loop, "", [this](std::shared_ptr<transport::Connection> one) { far = std::move(one); }});
    near = routes.connect(offers, {loop, Deadline::in(std::chrono::seconds(20))});
    ASSERT_TRUE(
        loop->drive([this] { return far != nullptr; }, Deadline::in(std::chrono::seconds(20))));
  }
  // A message as the other end has received it.
  struct Got {
    Head head;
    std::string text;
    std::vector<at::Tensor> tensors;
    std::vector<std::uint64_t> sizes;  // which the receiver saw before the payloads
  };
  Got exchange(const Head& head, codec::Encoded message) {
    std::optional<Got> got;
    std::vector<std::uint64_t> sizes;
    if (!is_receiving) {
      is_receiving = true;
      far->receive(
          {[this](const transport::Arrival& arrival) { arrived(arrival); }, [](const Error&) {}});
    }
    arrived = [&](const transport::Arrival& arrival) {
      sizes.assign(arrival.sizes.begin(), arrival.sizes.end());
      receive_message(
          *far, arrival, {*pool, {}}, nullptr,
          [&](Message whole, const Error* lacking) {
            EXPECT_EQ(lacking, nullptr);
            Got now{whole.head, "", {}, sizes};
            codec::Reader(std::move(whole.parts))
                .read(whole.body, [&](const msgpack::object& object) {
                  std::tie(now.text, now.tensors) =
                      object.as<std::tuple<std::string, std::vector<at::Tensor>>>();
                });
            got = std::move(now);
          },
          [](const Error& why) { ADD_FAILURE() << why.what(); });
    };
    const Op op = send_message(*near, head, std::move(message));
    EXPECT_TRUE(
        loop->drive([&] { return got.has_value(); }, Deadline::in(std::chrono::seconds(20))));
    EXPECT_FALSE(op.error());
    return got.value_or(Got());
  }

  std::shared_ptr<EventLoop> loop =
      std::make_shared<EventLoop>("message", EventLoop::Thread::Given);
  std::shared_ptr<ReceivePool> pool = std::make_shared<ReceivePool>();
  transport::Routes routes{{"inproc"}};
  std::shared_ptr<transport::Connection> near;
  std::shared_ptr<transport::Connection> far;
  std::function<void(const transport::Arrival&)> arrived;
  bool is_receiving = false;
};

TEST_F(MessageLane, HeadTextAndTensorsArriveIntact) {
  Head head;
  head.kind = FrameKind::Call;
  head.call = 7;
  head.name = 8;
  const auto floats = at::rand({3, 5});
  const auto numbers = at::arange(4, at::kLong);
  const auto got = exchange(head, encoded({floats, numbers}));
  EXPECT_EQ(got.head.call, 7U);
  EXPECT_EQ(got.head.name, 8U);
  EXPECT_EQ(got.sizes, (std::vector<std::uint64_t>{60, 32}));
  EXPECT_EQ(got.text, "payload");
  ASSERT_EQ(got.tensors.size(), 2U);
  EXPECT_TRUE(at::equal(got.tensors[0], floats));
  EXPECT_TRUE(at::equal(got.tensors[1], numbers));
  EXPECT_EQ(got.tensors[1].scalar_type(), at::kLong);
}

TEST_F(MessageLane, TextAndTensorsMayBeEmpty) {
  Head head;
  head.kind = FrameKind::Reply;
  for (const std::string& text :
       {std::string(), std::string("text"), std::string(kMaxBodyInHeader + 100, 'x')}) {
    for (const auto& tensors : std::vector<std::vector<at::Tensor>>{
             {},
             {at::ones({2})},
             {at::empty({0}), at::ones({3}), at::Tensor(), at::eye(2, at::kDouble)}}) {
      const auto got = exchange(head, encoded(tensors, text));
      EXPECT_EQ(got.text, text);
      ASSERT_EQ(got.tensors.size(), tensors.size());
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        ASSERT_EQ(got.tensors[i].defined(), tensors[i].defined());
        if (tensors[i].defined()) {
          EXPECT_TRUE(at::equal(got.tensors[i], tensors[i]));
        }
      }
    }
  }
}

TEST_F(MessageLane, OnlyUsedBytesTravelUncopied) {
  Head head;
  head.kind = FrameKind::Call;
  const auto large = at::rand({1 << 20});
  const auto view = large.slice(0, 4096, 4096 + 1024);
  const auto of_view = encoded({view});
  ASSERT_EQ(of_view.parts.size(), 1U);
  EXPECT_EQ(of_view.parts[0].bytes, 4096U);
  const auto whole = encoded({large});
  EXPECT_EQ(whole.parts.at(0).data(), large.data_ptr()) << "a tensor is copied before it is sent";
  const auto got = exchange(head, encoded({view}));
  EXPECT_EQ(got.sizes, (std::vector<std::uint64_t>{4096}));
  EXPECT_EQ(got.tensors.at(0).storage().nbytes(), 4096U);
  EXPECT_TRUE(at::equal(got.tensors.at(0), view));
}

TEST_F(MessageLane, RowsTravelWithoutTheirStorage) {
  Head head;
  head.kind = FrameKind::Call;
  const auto large = at::rand({1024, 1024});
  const auto first = large.select(0, 0);
  const auto last = large.select(0, 1023);
  const auto message = encoded({first, last});
  ASSERT_EQ(message.parts.size(), 2U);
  EXPECT_EQ(message.parts[1].data(), last.data_ptr()) << "a tensor is copied before it is sent";
  const auto got = exchange(head, encoded({first, last}));
  EXPECT_EQ(got.sizes, (std::vector<std::uint64_t>{4096, 4096}));
  EXPECT_TRUE(at::equal(got.tensors.at(0), first));
  EXPECT_TRUE(at::equal(got.tensors.at(1), last));
}

TEST_F(MessageLane, BorrowedMemoryIsCopiedBeforeSend) {
  std::vector<float> borrowed(100, 1.5F);
  const auto tensor = at::from_blob(borrowed.data(), {100});
  auto message = encoded({tensor});
  EXPECT_NE(static_cast<void*>(message.parts.at(0).data()), static_cast<void*>(borrowed.data()));
  std::fill(borrowed.begin(), borrowed.end(), 0.0F);
  Head head;
  head.kind = FrameKind::Call;
  const auto got = exchange(head, std::move(message));
  EXPECT_TRUE(at::equal(got.tensors.at(0), at::full({100}, 1.5)));
}

// Peers are not trusted: they may name a GPU that the receiver does not use, or send to a GPU over
// a connection that takes host memory only.
TEST_F(MessageLane, HostConnectionRefusesGpuStorage) {
  Head head;
  head.kind = FrameKind::Call;
  head.call = 11;
  std::optional<Error> why;
  std::uint64_t call = 0;
  far->receive({[&](const transport::Arrival& arrival) {
                  receive_message(
                      *far, arrival, {*pool, {0, 1}}, nullptr,
                      [&](Message whole, const Error* lacking) {
                        EXPECT_TRUE(whole.parts.empty());
                        call = whole.head.call;
                        if (lacking != nullptr) why = *lacking;
                      },
                      [](const Error& refused) { ADD_FAILURE() << refused.what(); });
                },
                [](const Error&) {}});
  Outgoing outgoing(encoded({at::ones({4})}));
  outgoing.to = {Device::cuda(1)};
  send_message(*near, head, std::move(outgoing));
  EXPECT_TRUE(loop->drive([&] { return call == 11; }, Deadline::in(std::chrono::seconds(20))));
  ASSERT_TRUE(why);
  EXPECT_EQ(why->blame(), Blame::Caller);
  head.call = 12;
  send_message(*near, head, codec::Encoded());
  EXPECT_TRUE(loop->drive([&] { return call == 12; }, Deadline::in(std::chrono::seconds(20))));
}

// Counts messages sent and accepted: sizes that a peer declares are checked before memory is
// allocated for them.
class Declared : public transport::Connection {
 public:
  std::string_view transport() const override { return "declared"; }
  std::string peer() const override { return "nobody"; }
  const transport::Capabilities& capabilities() const override { return capabilities_; }
  void receive(Handlers) override {}
  Op send(std::span<const std::byte>, std::span<const Slice>, Pin, Fence) noexcept override {
    ++sent;
    return Op();
  }
  Op accept(std::span<const Slice> destinations, Pin, Fence) noexcept override {
    ++accepted;
    payloads = destinations.size();
    return Op();
  }
  void close(const Error&) noexcept override {}

  int sent = 0;
  int accepted = 0;
  std::size_t payloads = 0;

 private:
  transport::Capabilities capabilities_;
};

// Returns why a message with payloads of these sizes is refused, or "".
std::string why_refused(const std::vector<std::uint64_t>& sizes, bool body_aside) {
  Head head;
  head.kind = FrameKind::Call;
  head.flags = body_aside ? kBodyAside : 0;
  head.storages = static_cast<std::uint32_t>(sizes.size() - (body_aside ? 1 : 0));
  std::vector<std::byte> header;
  append_head(header, head, std::vector<StorageEntry>(head.storages));
  const auto pool = std::make_shared<ReceivePool>();
  Declared lane;
  std::string refused;
  receive_message(
      lane, {header, sizes, {}}, {*pool, {}}, nullptr,
      [](const Message&, const Error* lacking) { EXPECT_EQ(lacking, nullptr) << lacking->what(); },
      [&](const Error& why) {
        EXPECT_EQ(why.blame(), Blame::Protocol);
        refused = why.text();
      });
  EXPECT_EQ(lane.accepted, 1) << "otherwise the connection receives nothing more";
  EXPECT_EQ(lane.payloads, refused.empty() ? sizes.size() : 0U);
  return refused;
}

TEST(MessageLimits, TooLargeIsRefusedBeforeAllocation) {
  constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
  EXPECT_EQ(why_refused({100, 200}, /*body_aside=*/true), "");
  EXPECT_NE(why_refused({kGiB + 1}, true).find("a body of more than 1 GiB"), std::string::npos);
  EXPECT_NE(why_refused({100, 256 * kGiB}, true).find("more than 256 GiB"), std::string::npos);
  EXPECT_NE(why_refused({256 * kGiB + 1}, false).find("more than 256 GiB"), std::string::npos);
  EXPECT_NE(why_refused({128 * kGiB, 128 * kGiB, 1}, false).find("more than 256 GiB"),
            std::string::npos);
  const std::uint64_t most = ~std::uint64_t{0};
  EXPECT_NE(why_refused({100, most, 200}, false).find("more than 256 GiB"), std::string::npos)
      << "the sum of the sizes has wrapped around";
}

TEST(MessageLimits, SenderRefusesWhatPeerWouldRefuse) {
  Declared lane;
  codec::Encoded message;
  message.parts.push_back({.bytes = (std::uint64_t{1} << 38) + 1});
  const Op op = send_message(lane, Head(), std::move(message));
  ASSERT_TRUE(op.ended() && op.error());
  EXPECT_EQ(op.error()->blame(), Blame::Caller);
  EXPECT_NE(op.error()->text().find("more than 256 GiB"), std::string::npos);
  EXPECT_EQ(lane.sent, 0);
}

}  // namespace
}  // namespace weft::call
