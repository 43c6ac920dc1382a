// SPDX-License-Identifier: Apache-2.0
// For any statements of a peer on a queue pair, in any order with the actions of this end: both
// halves of a connection accept them or give a reason, access only memory of theirs, and keep the
// contract of ByteStream. The input is a script: a byte chooses each step, and its arguments
// follow.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <weft/base/make_error.h>
#include <weft/tests/transport/verbs/ends.h>

namespace weft::transport::verbs {
namespace {

// A script's bytes, followed by zeros.
class Script {
 public:
  explicit Script(Bytes bytes) : bytes_(bytes) {}
  bool has_more() const { return !bytes_.empty(); }
  std::uint8_t byte() {
    if (bytes_.empty()) return 0;
    const auto value = std::to_integer<std::uint8_t>(bytes_.front());
    bytes_ = bytes_.subspan(1);
    return value;
  }
  std::uint32_t number() { return byte() | byte() << 8 | byte() << 16; }

 private:
  Bytes bytes_;
};

struct Lane {
  Ends ends;
  std::vector<std::byte> place = std::vector<std::byte>(kDirectBytes + 1000);
  std::vector<std::byte> piece = std::vector<std::byte>(kDirectBytes + 1000, std::byte{7});
  Bytes rest;               // of a piece that was partly taken: the next write() begins with it
  bool is_placing = false;  // after a read() that returned 0, its memory may be a named place
  unsigned sum = 0;
  std::uint64_t come = 0;  // bytes that the peer says it wrote to the ring

  void tell(std::uint32_t bytes) {
    if (ends.fake.write_to(ends.a.pair.number(), bytes)) come += bytes;
  }

  void write(std::size_t bytes) {
    const Bytes offered = rest.empty() ? Bytes(piece).first(std::min(bytes, piece.size())) : rest;
    const std::size_t taken = ends.a.writer.write(std::array{offered});
    if (taken > offered.size()) broken("more was taken than was offered");
    rest = offered.subspan(taken);
  }
  void read(std::size_t bytes) {
    const std::size_t count = is_placing ? place.size() : std::min(bytes, place.size());
    const std::size_t got = ends.a.reader.read(std::span(place).first(count));
    if (got > count) broken("more was read than there is room for");
    is_placing = got == 0 && count == place.size();
    for (std::size_t i = 0; i < got; ++i) sum += std::to_integer<unsigned>(place[i]);
  }
  void look(std::size_t bytes) {
    if (is_placing) return;
    const Bytes seen = ends.a.reader.peek();
    if (seen.size() > kRingBytes) broken("more was shown than the ring holds");
    for (const std::byte one : seen) sum += std::to_integer<unsigned>(one);
    ends.a.reader.consume(std::min(bytes, seen.size()));
  }
  void hear(Script& script) {
    Note note;
    note.kind = static_cast<Note::Kind>(script.byte() % 6);
    const std::uint8_t wrong = script.byte();  // mostly 0, else no connection would get far
    note.granted = (wrong & 15) == 1 ? script.byte() : 0;
    note.key = (wrong & 15) == 2 ? script.number() : ends.b.reader.ring_key();
    note.position = (wrong & 15) == 3 ? script.number() : come;
    note.bytes = std::uint64_t{script.number()} << ((wrong & 15) == 4 ? script.byte() % 40 : 0);
    note.address = ends.b.reader.ring_address() + script.byte();
    const auto bytes = encode(note);
    ends.fake.send_to(ends.a.pair.number(), bytes.data(),
                      std::min<std::size_t>(bytes.size(), 40 - script.byte() / 200));
  }
};

}  // namespace

// For the test of the target itself: returns how many steps ran before the connection was refused.
std::size_t fuzz_lane(Bytes input) {
  decode_hello(input).ok();
  Script script(input);
  Lane lane;
  std::size_t steps = 0;
  while (script.has_more() && lane.ends.a.refused.empty()) {
    switch (script.byte() % 10) {
      case 0: lane.hear(script); break;
      case 1: lane.tell(script.number() % 3000); break;
      case 2:
        if (script.byte() % 4 == 0) lane.tell(kPlaced | (script.byte() % 2));
        break;
      case 3: lane.write(script.byte()); break;
      case 4: lane.write(~std::size_t{0}); break;
      case 5: lane.read(script.byte()); break;
      case 6: lane.read(~std::size_t{0}); break;
      case 7: lane.look(script.number()); break;
      case 8: lane.ends.b.turn(); break;
      default: break;
    }
    lane.ends.a.turn();
    ++steps;
  }
  lane.ends.a.writer.withdraw();
  lane.ends.a.reader.withdraw();
  return steps;
}

}  // namespace weft::transport::verbs

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  weft::transport::verbs::fuzz_lane({reinterpret_cast<const std::byte*>(data), bytes});
  return 0;
}
