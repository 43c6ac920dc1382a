// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include <sys/wait.h>
#include <unistd.h>

#include <weft/tests/engine/launch/command.h>

namespace weft::launch {

namespace {

std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

std::vector<std::string> Outcome::lines() const {
  std::vector<std::string> lines;
  std::istringstream text(out);
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

Outcome run(const std::string& command) {
  std::string folder = std::filesystem::temp_directory_path() / "weft-launch-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return {-1, "", "mkdtemp failed"};
  std::ofstream(folder + "/command") << command << "\n";
  const std::string whole =
      "env -u RANK -u WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT timeout -s KILL 60 sh " + folder +
      "/command > " + folder + "/out 2> " + folder + "/err < /dev/null";
  const int status = std::system(whole.c_str());
  Outcome outcome{WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
                  read_file(folder + "/out"), read_file(folder + "/err")};
  std::filesystem::remove_all(folder);
  return outcome;
}

std::string path_of(const std::string& name) {
  const std::map<std::string, std::string> paths{
      {"weft-run", WEFT_TEST_RUN},
      {"weft-agent", WEFT_TEST_AGENT},
      {"weft-info", WEFT_TEST_INFO},
      {"join_and_reduce", WEFT_TEST_PROGRAM},
      {"crashing", WEFT_TEST_CRASHING},
      {"python", WEFT_TEST_PYTHON},
      {"torchrun", WEFT_TEST_PYTHON " -m torch.distributed.run"},
      {"sources", WEFT_TEST_SOURCES}};
  return paths.at(name);
}

}  // namespace weft::launch
