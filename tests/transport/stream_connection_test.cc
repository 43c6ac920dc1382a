// Connections over streams that misbehave on purpose. What every transport must do is in tests/conformance/connection.
#include <array>
#include <future>

#include <gtest/gtest.h>

#include <weft/tests/harness/mail.h>
#include <weft/transport/inproc/faults.h>
#include <weft/transport/stream_connection.h>

namespace weft::transport {
namespace {

using harness::bytes_of;
using harness::expect_good;
using harness::failure_of;
using harness::Letter;
using harness::Mailbox;
using harness::patience;
using harness::pattern;
using harness::slice_of;

constexpr std::size_t kPreamble = 8;
constexpr std::size_t kRing = 4096;

// Two ends over scripted streams, each on a loop of its own.
struct Ends {
  explicit Ends(const Capabilities& limits = inproc::capabilities(), std::size_t ring = kRing)
      : Ends(inproc::make_streams(ring), limits) {}
  explicit Ends(inproc::Streams streams, const Capabilities& limits = inproc::capabilities())
      : a_to_b(streams.a_to_b),
        b_to_a(streams.b_to_a),
        a(connect_over(std::move(streams.a), limits, "inproc", loop_a)),
        b(connect_over(std::move(streams.b), limits, "inproc", loop_b)) {}

  std::shared_ptr<EventLoop> loop_a = std::make_shared<EventLoop>("a");
  std::shared_ptr<EventLoop> loop_b = std::make_shared<EventLoop>("b");
  inproc::Faults a_to_b;
  inproc::Faults b_to_a;
  std::shared_ptr<Connection> a;
  std::shared_ptr<Connection> b;
};

TEST(StreamConnection, CarriesMessagesInPiecesOfAnySize) {
  for (const std::size_t at_most : {1u, 2u, 3u, 7u, 8u, 17u, 64u, 1000u}) {
    SCOPED_TRACE(at_most);
    inproc::Streams streams = inproc::make_streams(kRing);
    streams.a_to_b.move_at_most(at_most);
    Ends ends(std::move(streams));
    Mailbox mail(*ends.b, ends.loop_b);
    const auto small = pattern(1, 5);
    const auto large = pattern(2, 3 * kRing + 1);
    for (int round = 0; round < 3; ++round) {
      const std::vector<Slice> payloads{slice_of(small), {}, slice_of(large)};
      ends.a->send(bytes_of("header " + std::to_string(round)), payloads, nullptr, {});
      ends.a->send({}, {}, nullptr, {});
    }
    for (int round = 0; round < 3; ++round) {
      const Letter letter = mail.next();
      EXPECT_EQ(letter.header, "header " + std::to_string(round));
      ASSERT_EQ(letter.payloads.size(), 3u);
      EXPECT_EQ(letter.payloads[0], small);
      EXPECT_TRUE(letter.payloads[1].empty());
      EXPECT_EQ(letter.payloads[2], large);
      const Letter empty = mail.next();
      EXPECT_TRUE(empty.header.empty());
      EXPECT_TRUE(empty.payloads.empty());
    }
  }
}

TEST(StreamConnection, AMessageThatIsCutAnywhereIsNeverShownAsWhole) {
  const auto payload = pattern(3, 20);
  // preamble, then head, table of one, header, payload
  const std::size_t whole = kPreamble + 8 + 8 + 6 + payload.size();
  for (std::size_t at = 0; at < whole; ++at) {
    SCOPED_TRACE(at);
    Ends ends;
    ends.a_to_b.cut_at(at);
    Mailbox mail(*ends.b, ends.loop_b);
    ends.a->send(bytes_of("header"), std::array{slice_of(payload)}, nullptr, {});
    const Error why = mail.wait_closed();
    EXPECT_EQ(why.blame(), Blame::PeerLost);
    EXPECT_NE(why.text().find("a (inproc)"), std::string::npos) << why.text();
    EXPECT_EQ(mail.count(), 0u);
    EXPECT_EQ(mail.closings(), 1);
  }
  Ends ends;
  ends.a_to_b.cut_at(whole);
  Mailbox mail(*ends.b, ends.loop_b);
  ends.a->send(bytes_of("header"), std::array{slice_of(payload)}, nullptr, {});
  EXPECT_EQ(mail.next().payloads.at(0), payload);
  EXPECT_EQ(mail.wait_closed().blame(), Blame::PeerLost);
}

}  // namespace
}  // namespace weft::transport
