// What digits writes after each epoch and continues from: the network, the optimizer's state and the number of epochs done.
// Errors are std::runtime_error and name the file.
#pragma once

#include <string>

#include <torch/torch.h>

namespace digits {

// That the file can be written, found out before the training and not after its first epoch. Makes no file that stays.
void check_checkpoint(const std::string& file);

void save_checkpoint(const std::string& file, const torch::nn::Module& net, const torch::optim::Optimizer& optimizer,
                     int epochs_done);

// Returns the number of epochs done.
int load_checkpoint(const std::string& file, torch::nn::Module& net, torch::optim::Optimizer& optimizer,
                    torch::Device device);

}  // namespace digits
