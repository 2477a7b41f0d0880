// config: options from text to one validated struct.
//
// The command line, the environment and Python all set options through hobbit_config_set(); nothing else parses them.
// The model takes a copy when it is created.

#pragma once

#include "cache.h"
#include "precision.h"

#include <cstdint>
#include <set>
#include <string>

enum hobbit_io : int8_t {
    HOBBIT_IO_AUTO,     // direct, unless memory has room for all experts in the page cache beside the expert cache
    HOBBIT_IO_DIRECT,   // past the page cache
    HOBBIT_IO_BUFFERED, // through it
    HOBBIT_IO_URING,    // past it, through io_uring if the kernel has it
};

// who says what the next layers will want
enum hobbit_predictor : int8_t {
    HOBBIT_PREDICTOR_ROUTER,      // the next layer's router, from this layer's input
    HOBBIT_PREDICTOR_ACTIVATIONS, // the past request that the running one resembles
};

// what is read where an expert is missing
enum hobbit_unit : int8_t {
    HOBBIT_UNIT_EXPERT,
    HOBBIT_UNIT_LAYER, // all experts of its layer, chosen or not
};

enum hobbit_repack : int8_t {
    HOBBIT_REPACK_AUTO, // as the model's other weights: unless --no-repack
    HOBBIT_REPACK_ON,
    HOBBIT_REPACK_OFF,
};

// what happens to an expert that a device misses and computing wants
enum hobbit_miss : int8_t {
    HOBBIT_MISS_LOAD, // it is copied to the device
    HOBBIT_MISS_CPU,  // the CPU computes it
    HOBBIT_MISS_AUTO, // whichever is done sooner
};

struct hobbit_config {
    bool        cache_auto  = true;
    uint64_t    cache_bytes = 0; // when not auto
    bool        device_cache_auto  = false;
    bool        device_cache_off   = true;
    uint64_t    device_cache_bytes = 0; // when neither
    hobbit_miss miss = HOBBIT_MISS_LOAD;
    std::string low_path;        // "": no low-precision file named

    bool              rule_set   = false; // else: hobbit with a low file, high without
    hobbit_thresholds thresholds = { HOBBIT_RULE_HIGH, 0.6f, 1.0f };
    hobbit_prefill    prefill       = HOBBIT_PREFILL_MASS;
    bool              renormalise   = false;
    bool              deterministic = false;
    bool              thresholds_set = false; // T1 or T2 was given
    float             quality_budget = -1.0f; // perplexity increase in percent for which the profile chooses T1 and T2; < 0: none

    hobbit_policy_params policy;
    float                low_share = 0.2f; // of the cache's bytes, when both precisions are in use

    int         prefetch_depth    = 2;    // layers to look ahead, at most
    bool        prefetch_adaptive = true; // else always that many
    hobbit_predictor predictor    = HOBBIT_PREDICTOR_ROUTER;
    hobbit_unit      unit         = HOBBIT_UNIT_EXPERT;

    bool keeps_activations() const { return policy.policy == HOBBIT_POLICY_ACTIVATIONS || predictor == HOBBIT_PREDICTOR_ACTIVATIONS; }

    hobbit_io   io         = HOBBIT_IO_AUTO;
    int         io_threads = 4;
    hobbit_repack repack   = HOBBIT_REPACK_AUTO;
    bool        check      = false;
    std::string stats_path;   // "": none
    std::string profile_path; // "": none
    std::string trace_path;   // "": none
    bool        verbose    = false;

    std::set<std::string> given; // names of the options that were set: a profile's settings do not replace them
};

// a copy of what the handle holds; false: no such handle
bool hobbit_config_get(int32_t handle, hobbit_config & config);

// sets one option, as hobbit_config_set does, and checks that all fit together; false: err says what would work
bool hobbit_config_apply(hobbit_config & config, const std::string & name, const std::string & value, std::string & err);
bool hobbit_config_fits (const hobbit_config & config, std::string & err);

const char * hobbit_rule_name  (hobbit_rule rule);
const char * hobbit_policy_name(hobbit_policy policy);
const char * hobbit_prefill_name(hobbit_prefill prefill);
const char * hobbit_miss_name(hobbit_miss miss);
const char * hobbit_unit_name   (hobbit_unit unit);

// copies msg into the C API's err buffer; returns false, so that a caller can return it
bool hobbit_fail(char * err, size_t err_size, const std::string & msg);
