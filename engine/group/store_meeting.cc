#include <weft/engine/group/store_meeting.h>

namespace weft::group {

std::vector<int> absent_from(StoreBootstrap& store, const std::string& base, int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) {
    if (!store.exists(base + std::to_string(rank))) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace weft::group
