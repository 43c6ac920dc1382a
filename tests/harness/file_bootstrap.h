// SPDX-License-Identifier: Apache-2.0
// A Bootstrap for ranks that are processes of one machine: a folder with one file for each key.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/transport/bootstrap.h>

namespace weft::harness {

class FileBootstrap : public transport::Bootstrap {
 public:
  explicit FileBootstrap(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_);
  }

  void set(const std::string& key, const Bytes& value) override {
    const auto path = path_of(key);
    auto draft = path;
    draft += ".draft" + std::to_string(getpid());
    {
      std::ofstream file(draft, std::ios::binary);
      file.write(reinterpret_cast<const char*>(value.data()),
                 static_cast<std::streamsize>(value.size()));
    }
    std::filesystem::rename(draft, path);  // the file appears complete
  }
  // Polls, because a process is not notified of another one's files.
  Bytes get(const std::string& key, Deadline deadline) override {
    while (!exists(key)) {
      if (deadline.passed()) throw Error(Blame::Timeout, "no rank set '" + key + "'");
      std::this_thread::yield();
    }
    std::ifstream file(path_of(key), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
    return {bytes, bytes + text.size()};
  }
  long add(const std::string& key, long amount) override {
    const int lock = ::open((folder_ / "lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    flock(lock, LOCK_EX);
    long sum = amount;
    if (exists(key)) {
      const Bytes before = get(key, Deadline::never());
      sum += std::stol(std::string(reinterpret_cast<const char*>(before.data()), before.size()));
    }
    const std::string text = std::to_string(sum);
    const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
    set(key, {bytes, bytes + text.size()});
    ::close(lock);
    return sum;
  }
  bool compare_set(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    const int lock = ::open((folder_ / "lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    flock(lock, LOCK_EX);
    const bool is_there = exists(key);
    const bool fits = is_there ? get(key, Deadline::never()) == expected : expected.empty();
    if (fits) set(key, desired);
    ::close(lock);
    return fits;
  }
  bool exists(const std::string& key) override { return std::filesystem::exists(path_of(key)); }
  void erase(const std::string& key) override { std::filesystem::remove(path_of(key)); }

 private:
  std::filesystem::path path_of(const std::string& key) const {
    std::string name = key;
    for (char& letter : name) {
      if (letter == '/') letter = '.';
    }
    return folder_ / ("key." + name);
  }
  std::filesystem::path folder_;
};

}  // namespace weft::harness
