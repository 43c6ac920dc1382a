// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/instruments/timeline_upload.h>
#include <weft/engine/store/store.h>
#include <weft/profiling/trace/timeline.h>

namespace weft::instruments {

namespace {

using Bytes = transport::Bootstrap::Bytes;
using File = std::unique_ptr<std::FILE, decltype([](std::FILE* file) { std::fclose(file); })>;

// Patience after one rank has not answered: several may be gone then.
constexpr auto kHurry = std::chrono::seconds(1);

// Not a string of static storage, because a group may outlive it.
std::string key(const std::string& what) { return "weft/timeline/parts/" + what; }
std::string key(int rank, const std::string& what) {
  return key(std::to_string(rank) + "/" + what);
}

std::uint64_t number(const std::string& text, std::uint64_t most, const char* what) {
  std::uint64_t value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure == std::errc() && end == text.data() + text.size() && !text.empty() && value <= most)
    return value;
  throw Error(Blame::PeerLost, "'" + text.substr(0, 40) + "' in the job's store is not a " + what);
}

// Uses only the part's file name: the folder may have another path on this machine.
std::filesystem::path beside(const std::string& file, const std::string& part) {
  return std::filesystem::path(trace::timeline::folder_of_parts(file)) /
         std::filesystem::path(part).filename();
}

File open(const std::string& path, const char* how) {
  File file(std::fopen(path.c_str(), how));
  if (!file) throw system_error(Blame::Caller, "'" + path + "' cannot be opened", errno);
  return file;
}

Bytes read_some(std::FILE* file, std::uint64_t most) {
  Bytes bytes(static_cast<std::size_t>(std::min<std::uint64_t>(most, kPiece)));
  bytes.resize(std::fread(bytes.data(), 1, bytes.size(), file));
  return bytes;
}

std::uint64_t pieces(std::uint64_t bytes) { return (bytes + kPiece - 1) / kPiece; }

void take_part(transport::Bootstrap& store, int rank, const std::string& path,
               std::chrono::milliseconds patience) {
  const std::string head = group::to_text(store.get(key(rank, "bytes"), Deadline::in(patience)));
  store.erase(key(rank, "bytes"));
  const std::uint64_t bytes =
      number(head, trace::timeline::kMostPart, "size of a part of the timeline");
  const std::string fresh = path + ".new";
  {
    const File file = open(fresh, "wb");
    std::uint64_t left = bytes;
    for (std::uint64_t i = 0; i < pieces(bytes); ++i) {
      const std::string piece = key(rank, std::to_string(i));
      const Bytes taken = store.get(piece, Deadline::in(patience));
      store.erase(piece);
      if (taken.size() != std::min<std::uint64_t>(left, kPiece))
        throw Error(Blame::PeerLost, "a piece of it has another size than was announced");
      left -= taken.size();
      if (std::fwrite(taken.data(), 1, taken.size(), file.get()) != taken.size())
        throw system_error(Blame::Caller, "writing '" + fresh + "'", errno);
      store.set(key(rank, "taken/" + std::to_string(i)), {});
    }
    if (std::fflush(file.get()) != 0)
      throw system_error(Blame::Caller, "writing '" + fresh + "'", errno);
  }
  std::filesystem::rename(fresh, path);
  // The store may end with this process, so waits until the sender needs it no more.
  try {
    store.get(key(rank, "done"), Deadline::in(patience));
    store.erase(key(rank, "done"));
  } catch (const Error& error) {
    log::debug("rank " + std::to_string(rank) +
               " was not told that its part has arrived: " + error.text());
  }
}

}  // namespace

void show_part(transport::Bootstrap& store, const std::string& path) {
  store.set(key("first"), group::to_bytes(path));
}

bool is_away(transport::Bootstrap& store, int rank, const std::string& file, Deadline deadline) {
  const std::string first = group::to_text(store.get(key("first"), deadline));
  std::error_code ignored;
  if (std::filesystem::exists(beside(file, first), ignored)) return false;
  const long place = store.add(key("away"), 1);
  store.set(key("away/" + std::to_string(place)), group::to_bytes(std::to_string(rank)));
  return true;
}

void send_part(transport::Bootstrap& store, int rank, const std::string& path) {
  const File file = open(path, "rb");
  const std::uint64_t bytes = std::filesystem::file_size(path);
  store.set(key(rank, "bytes"), group::to_bytes(std::to_string(bytes)));
  const auto wait_until_taken = [&](std::uint64_t piece) {
    const std::string taken = key(rank, "taken/" + std::to_string(piece));
    // Rank 0 may take the parts of other ranks before this one.
    store.get(taken, Deadline::in(3 * kPatience));
    store.erase(taken);
  };
  const std::uint64_t count = pieces(bytes);
  std::uint64_t left = bytes;
  for (std::uint64_t i = 0; i < count; ++i) {
    if (i >= kPiecesAhead) wait_until_taken(i - kPiecesAhead);
    const Bytes piece = read_some(file.get(), left);
    left -= piece.size();
    store.set(key(rank, std::to_string(i)), piece);
  }
  for (std::uint64_t i = count - std::min<std::uint64_t>(count, kPiecesAhead); i < count; ++i)
    wait_until_taken(i);
  store.set(key(rank, "done"), {});
}

int take_parts(transport::Bootstrap& store, int ranks, const std::string& file,
               const std::string& job) {
  const long away = store.add(key("away"), 0);
  std::set<int> taken;
  std::chrono::milliseconds patience = kPatience;
  for (long place = 1; place <= std::min<long>(away, ranks - 1); ++place) {
    const std::string text =
        group::to_text(store.get(key("away/" + std::to_string(place)), Deadline::in(kPatience)));
    const int rank =
        static_cast<int>(number(text, static_cast<std::uint64_t>(ranks - 1), "rank of the job"));
    const std::string path =
        trace::timeline::folder_of_parts(file) + "/" + job + "." + std::to_string(rank) + ".away";
    try {
      take_part(store, rank, path, patience);
      taken.insert(rank);
    } catch (const Error& error) {
      log::warn("the timeline lacks rank " + std::to_string(rank) +
                ", whose part did not arrive: " + error.text());
      if (error.blame() == Blame::Timeout) patience = kHurry;
      std::error_code ignored;
      std::filesystem::remove(path + ".new", ignored);  // the incomplete part
    }
  }
  return static_cast<int>(taken.size());
}

}  // namespace weft::instruments
