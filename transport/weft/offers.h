// SPDX-License-Identifier: Apache-2.0
// The address of a rank of the backend "weft": a line for each transport on which it listens, its
// name and its address: "shm …\ntcp …\n". It comes from a peer, so the decoder bounds all of it. A
// transport that this process does not know is kept, and not used.
#pragma once

#include <string>
#include <vector>

#include <weft/base/result.h>
#include <weft/transport/routes.h>

namespace weft::transport::weft {

std::string encode(const std::vector<Offer>& offers);
// Returns a Caller error, naming the mistake, for a text that is not such an address.
Result<std::vector<Offer>> decode(const std::string& text);

}  // namespace weft::transport::weft
