// SPDX-License-Identifier: Apache-2.0
// weft::checkpoint: save_async, save, load, exists, check_writable, per_rank, load_safetensors.
#pragma once

#include <weft/engine/checkpoint/checkpoint.h>
#include <weft/engine/checkpoint/pretrained.h>
#include <weft/error.h>
#include <weft/group.h>
