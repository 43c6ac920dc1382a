// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/engine/checkpoint/checkpoint_file.h>
#include <weft/engine/checkpoint/folder.h>
#include <weft/engine/checkpoint/slice_file.h>
#include <weft/engine/group/collective_error.h>

namespace weft::checkpoint {

namespace {

constexpr const char* kSuffix = ".safetensors";

[[noreturn]] void cannot_write(const std::string& folder, const std::string& why) {
  throw Error(Blame::Caller, "the checkpoint's folder '" + folder + "' cannot be written: " + why);
}
[[noreturn]] void cannot_write(const std::string& folder, int number) {
  throw system_error(blame_of(number), "the checkpoint's folder '" + folder + "' cannot be written",
                     number);
}

// The names in a folder, sorted.
std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  std::error_code failed;
  for (std::filesystem::directory_iterator at(folder, failed), end; !failed && at != end;
       at.increment(failed))
    names.insert(at->path().filename());
  if (failed)
    throw system_error(blame_of(failed.value()),
                       "the checkpoint's folder '" + folder + "' cannot be read", failed.value());
  return names;
}

// The numbers of the folders that are named by one, in order.
std::set<std::uint64_t> numbers_in(const std::string& folder) {
  std::set<std::uint64_t> numbers;
  for (const std::string& name : names_in(folder)) {
    std::uint64_t number = 0;
    const char* const end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data(), end, number);
    if (parsed.ec != std::errc() || parsed.ptr != end || std::to_string(number) != name) continue;
    if (is_folder(folder + "/" + name)) numbers.insert(number);
  }
  return numbers;
}

// The highest number of a save that failed, by folder, in this process. Its checkpoint was removed,
// but another rank or worker may not know that yet.
class FailedNumbers {
 public:
  static FailedNumbers& get() {
    static auto* const all = new FailedNumbers();  // threads may end after static objects
    return *all;
  }
  void add(const std::string& folder, std::uint64_t number) {
    MutexLock lock(mutex_);
    auto& last = last_[std::filesystem::absolute(folder).lexically_normal()];
    last = std::max(last, number);
  }
  std::uint64_t last(const std::string& folder) {
    MutexLock lock(mutex_);
    const auto found = last_.find(std::filesystem::absolute(folder).lexically_normal());
    return found == last_.end() ? 0 : found->second;
  }

 private:
  Mutex mutex_;
  std::map<std::string, std::uint64_t> last_ WEFT_GUARDED_BY(mutex_);
};

bool is_whole(const std::string& checkpoint) { return is_file(checkpoint + "/" + kManifest); }

// True for the names of files that save_async() makes.
bool is_own_name(const std::string& name) {
  return name == kManifest || name == std::string(kManifest) + ".new" ||
         (name.starts_with("rank") && name.ends_with(kSuffix));
}

// True for a checkpoint of save_async() that was cut off. Others may have folders with numbers too.
bool is_cut_off(const std::string& folder) {
  const auto names = names_in(folder);
  return !names.contains(kManifest) && std::ranges::all_of(names, is_own_name);
}

// Removes the manifest first, so that what is left of an interrupted removal is no checkpoint.
void remove_checkpoint(const std::string& folder) {
  const auto remove = [&](const std::string& name) {
    if (::unlink((folder + "/" + name).c_str()) != 0 && errno != ENOENT)
      throw system_error(Blame::Caller, "'" + folder + "/" + name + "' cannot be removed", errno);
  };
  remove(kManifest);
  for (const std::string& name : names_in(folder)) {
    if (is_own_name(name)) remove(name);
  }
  if (::rmdir(folder.c_str()) != 0 && errno != ENOENT)
    throw system_error(Blame::Caller, "'" + folder + "' cannot be removed", errno);
}

// Failures are warnings.
void remove_cut_off(const std::string& folder, const std::set<std::uint64_t>& numbers) {
  for (const std::uint64_t number : numbers) {
    const std::string one = folder + "/" + std::to_string(number);
    const auto failure = group::error_of([&] {
      if (is_cut_off(one)) remove_checkpoint(one);
    });
    if (failure)
      log::warn("checkpoint::save_async: '" + one +
                "', which was cut off, stays: " + failure->text());
  }
}

// Reads the manifest of a whole checkpoint.
Manifest manifest_of(const std::string& checkpoint) {
  Manifest manifest;
  const auto failure = group::error_of([&] {
    Reader reader(checkpoint + "/" + kManifest);
    std::string text(reader.bytes(), '\0');
    reader.read(text.data());
    manifest = parse_manifest(text);
  });
  if (failure) throw failure->within("the checkpoint '" + checkpoint + "' cannot be loaded");
  return manifest;
}

// The checkpoint of another program: a folder of safetensors files. nullopt if there are none, or
// save_async() was cut off while it wrote them.
std::optional<Manifest> foreign(const std::string& folder) {
  Manifest manifest;
  for (const std::string& name : names_in(folder)) {
    if (!name.ends_with(kSuffix) || name.starts_with(".")) continue;
    if (is_own_name(name)) return std::nullopt;
    manifest.files.push_back(index_of(folder, name));
  }
  if (manifest.files.empty()) return std::nullopt;
  const auto failure = group::error_of([&] { tensors_of(manifest); });
  if (failure) throw failure->within("the checkpoint '" + folder + "' cannot be loaded");
  return manifest;
}

// The newest whole checkpoint, and the newer ones that are not whole.
std::optional<std::uint64_t> newest(const std::string& folder, std::vector<std::string>& cut_off) {
  const auto numbers = numbers_in(folder);
  for (auto at = numbers.rbegin(); at != numbers.rend(); ++at) {
    const std::string one = folder + "/" + std::to_string(*at);
    if (is_whole(one)) return *at;
    cut_off.push_back(one);
  }
  return std::nullopt;
}

}  // namespace

bool is_folder(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) return S_ISDIR(status.st_mode);
  if (errno == ENOENT || errno == ENOTDIR) return false;
  throw system_error(blame_of(errno), "cannot check whether the checkpoint '" + path + "' exists",
                     errno);
}

Found find(const std::string& path) {
  if (is_whole(path)) return {"", manifest_of(path)};
  std::vector<std::string> cut_off;
  const auto number = newest(path, cut_off);
  if (number) {
    for (const std::string& one : cut_off)
      log::warn("checkpoint::load: '" + one +
                "' was cut off while it was written; it is passed over");
    const std::string below = "/" + std::to_string(*number);
    return {below, manifest_of(path + below)};
  }
  if (auto manifest = foreign(path)) return {"", std::move(*manifest)};
  throw Error(Blame::Caller,
              "the folder '" + path + "' has no whole checkpoint" +
                  (cut_off.empty() ? "" : ": '" + cut_off.front() + "' was cut off"));
}

bool has_whole(const std::string& path) {
  std::vector<std::string> cut_off;
  return is_whole(path) || newest(path, cut_off) || foreign(path);
}

Numbered::Numbered(const std::string& folder) : folder_(folder) {
  if (folder.empty()) cannot_write(folder, "it has no name");
  if (::mkdir(folder.c_str(), 0777) == 0) {
    if (const int number = sync_folder_of(folder)) cannot_write(folder, number);
  } else if (errno == ENOENT) {
    cannot_write(folder, "the folder that it would be in is missing; make that first");
  } else if (errno != EEXIST) {
    cannot_write(folder, errno);
  }
  if (!is_folder(folder)) cannot_write(folder, "it is not a folder; name another one");
  lock_ = Descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!lock_) cannot_write(folder, errno);
  // A file system without locks: the checkpoint is written without one.
  const bool is_locked = ::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0;
  if (!is_locked && errno == EWOULDBLOCK) {
    throw Error(Blame::Busy,
                "the checkpoint's folder '" + folder +
                    "' cannot be written: another process or group is writing a checkpoint there");
  }
  const auto numbers = numbers_in(folder);
  const std::uint64_t newest = numbers.empty() ? 0 : *numbers.rbegin();
  number_ = 1 + std::max(newest, FailedNumbers::get().last(folder));
  // Under the lock, no process writes what was cut off, and the new one may need its space.
  if (is_locked) remove_cut_off(folder, numbers);
  const std::string own = folder + "/" + std::to_string(number_);
  if (::mkdir(own.c_str(), 0777) != 0) cannot_write(own, errno);
}

Numbered::~Numbered() {
  if (!is_published_) {
    const auto failure = group::error_of([&] {
      FailedNumbers::get().add(folder_, number_);
      remove_checkpoint(folder_ + "/" + std::to_string(number_));
    });
    if (failure) log::warn(failure->text());
  }
  // Closing would not unlock it while a forked child has the descriptor.
  ::flock(lock_.get(), LOCK_UN);
}

void Numbered::publish(const Manifest& manifest) {
  const std::string text = encode(manifest);
  Draft draft(folder_ + "/" + std::to_string(number_) + "/" + kManifest);
  draft.write(text.data(), text.size());
  draft.publish();
  is_published_ = true;
  // Makes the folder's name durable. Some file systems cannot do that (EINVAL).
  if (::fsync(lock_.get()) != 0 && errno != EINVAL) cannot_write(folder_, errno);
}

void Numbered::remove_old(int keep) const {
  const auto failure = group::error_of([&] {
    const auto numbers = numbers_in(folder_);
    int whole = 0;
    for (auto at = numbers.rbegin(); at != numbers.rend(); ++at) {
      const std::string one = folder_ + "/" + std::to_string(*at);
      if (*at > number_) continue;
      if (is_whole(one) ? ++whole > keep : is_cut_off(one)) remove_checkpoint(one);
    }
  });
  if (failure) log::warn("checkpoint::save_async: an old checkpoint stays: " + failure->text());
}

std::string file_name_of(int rank) {
  char name[32];
  std::snprintf(name, sizeof name, "rank%05d%s", rank, kSuffix);
  return name;
}

void check_folder_writable(const std::string& folder) {
  if (::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) != 0)
    cannot_write(folder, errno);
}

}  // namespace weft::checkpoint
