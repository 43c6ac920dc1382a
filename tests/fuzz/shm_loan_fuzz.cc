// SPDX-License-Identifier: Apache-2.0
// For any numbers that a peer writes into the control words of a loan, the borrower writes only
// into the memory that it was given and reads only the peer's memory, and the lender takes back no
// more than it has lent. The input consists of records of 10 bytes: an event, its argument, a
// number.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/shm/loan.h>

namespace weft::transport::shm {
namespace {

constexpr std::size_t kRecord = 10;
constexpr std::size_t kMost = 6000;
constexpr std::size_t kGuard = 64;
constexpr std::byte kUntouched{0xa5};

void run(const std::uint8_t* input, std::size_t bytes) {
  const Proof proof{1, 2};
  LoanControl incoming{}, outgoing{};
  Borrower borrower(&incoming);
  Lender lender(&outgoing);
  // This process stands for the peer as well.
  borrower.open({::getpid(), reinterpret_cast<std::uintptr_t>(proof.data()), proof});
  const std::vector<std::byte> memory(kMost, std::byte{1});
  std::vector<std::byte> to(kMost + kGuard);
  for (; bytes >= kRecord; input += kRecord, bytes -= kRecord) {
    std::uint64_t number = 0;
    std::memcpy(&number, input + 2, sizeof number);
    switch (input[0] % 9) {
      case 0: incoming.state = number; break;
      case 1: incoming.address = number; break;
      case 2:
        incoming.address = reinterpret_cast<std::uintptr_t>(memory.data()) + number % kMost;
        break;
      case 3: incoming.bytes = input[1] % 2 == 0 ? number : number % kMost; break;
      case 4: incoming.state = number % 1000 * 4 + 1; break;
      case 5: {
        const std::size_t wanted = number % kMost;
        std::fill(to.begin() + static_cast<long>(wanted), to.end(), kUntouched);
        if (borrower.read(std::span(to).first(wanted)) > wanted)
          broken("more was read than was wanted");
        if (std::any_of(to.begin() + static_cast<long>(wanted), to.end(),
                        [](std::byte one) { return one != kUntouched; }))
          broken("a read wrote behind the memory that it was given");
        break;
      }
      case 6: {
        const std::size_t shown = borrower.peek().size();
        if (shown > 0) borrower.consume(number % shown + 1);
        break;
      }
      case 7: {
        const std::size_t lent = number % kMost + 1;
        if (!lender.is_out()) lender.lend(std::span(memory).first(lent));
        if (input[1] % 4 == 0) outgoing.state = number;
        if (input[1] % 4 == 1) outgoing.state.fetch_add(1);
        break;
      }
      default: {
        outgoing.read = input[1] % 2 == 0 ? number : number % kMost;
        if (!lender.is_back()) break;
        const auto read = lender.take_back();
        if (read && *read > kMost) broken("more came back than was lent");
        break;
      }
    }
  }
}

}  // namespace
}  // namespace weft::transport::shm

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  weft::transport::shm::run(data, bytes);
  return 0;
}
