// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <weft/transport/communicator.h>

namespace weft::transport {

// Which transport leads from this rank to which others: "shm to rank 1; tcp to ranks 2, 3"; for
// more than 16 ranks only their number: "tcp to 62 ranks". Empty for a communicator of one rank.
std::string transports_text(const Communicator& communicator);

}  // namespace weft::transport
