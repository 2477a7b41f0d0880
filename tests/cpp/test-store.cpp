// store: finds every expert's bytes, and refuses a low-precision file that is damaged or belongs to another model

#include "check.h"
#include "moe-file.h"

#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>

static temp_dir dir;

// a store over the file that describes the model, ready for open_low
struct open_store {
    hobbit_store store;
    int          fd;
    bool         ok;
    std::string  err;

    explicit open_store(const moe_file & model) {
        const std::string path = dir / "high.gguf";
        model.write(path);
        fd = open(path.c_str(), O_RDONLY);
        show_all_tensors(store, path, fd);
        ok = store.finish(err);
    }
    ~open_store() { close(fd); }

    // the error of opening path as the low file, "" if it is accepted
    std::string low(const std::string & path) {
        std::string why;
        return store.open_low(path, nullptr, why) ? "" : why;
    }
};

static bool has(const std::string & text, const char * part) {
    return text.find(part) != std::string::npos;
}

static void every_expert_is_found() {
    moe_file model;
    model.n_layer = 3;
    open_store s(model);
    CHECK(s.ok);
    CHECK(s.store.n_layer() == 3);
    CHECK(s.store.n_expert() == 4);
    for (int layer = 0; layer < 3; ++layer) {
        for (int role = 0; role < 3; ++role) {
            const hobbit_weight * w = s.store.layers[layer].weight[role];
            CHECK(w && w->layer == layer);
            for (int e = 0; e < 4; ++e) {
                const hobbit_source & src = w->source[HOBBIT_HIGH];
                std::vector<float> data(src.expert_bytes / sizeof(float));
                std::string err;
                CHECK(hobbit_file_read(*src.file, src.offset + e * src.expert_bytes, data.data(), src.expert_bytes, err));
                CHECK(data.front() == moe_file::value(layer, role, e) && data.back() == data.front());
            }
        }
        CHECK(s.store.layers[layer].weight[HOBBIT_ROLE_GATE_UP] == nullptr);
    }
}

static void only_routed_experts_are_managed() {
    hobbit_store store;
    ggml_tensor  t = {};
    t.ne[0] = t.ne[1] = t.ne[2] = t.ne[3] = 1;
    for (const char * name : { "blk.0.ffn_down.weight", "blk.0.ffn_down_shexp.weight", "blk.0.ffn_down_chexps.weight", "blk.0.ffn_norm_exps.weight",
                               "blk.0.ffn_down_exps.bias", "blk.0.ffn_down_exps.scale", "x.blk.0.ffn_down_exps.weight", "blk.0.ffn_down_exps.weight2",
                               "blk.0.ffn_gate_inp.weight", "blk..ffn_down_exps.weight", "blk.0.ffn_down.0.weight" }) {
        ggml_set_name(&t, name);
        CHECK(!store.add_tensor(&t, 0, 0));
    }
    for (const char * name : { "blk.0.ffn_down_exps.weight", "blk.61.ffn_gate_up_exps.weight" }) {
        ggml_set_name(&t, name);
        CHECK(store.add_tensor(&t, 0, 0));
    }
}

static void dense_model_is_refused() {
    hobbit_store store;
    store.arch = "llama";
    std::string err;
    CHECK(!store.finish(err));
    CHECK(has(err, "dense") && has(err, "llama"));
}

static void a_quantised_file_of_the_same_model_is_low() {
    open_store s({});
    moe_file low;
    low.type = GGML_TYPE_Q4_0;
    low.write(dir / "low.gguf");
    CHECK(s.low(dir / "low.gguf") == "");
    for (const auto & w : s.store.weights) {
        CHECK(w->source[HOBBIT_LOW].type == GGML_TYPE_Q4_0);
        CHECK(w->source[HOBBIT_LOW].expert_bytes == ggml_row_size(GGML_TYPE_Q4_0, w->ne[0]) * w->ne[1]);
    }
}

static void another_model_is_refused() {
    const auto refused = [](const moe_file & other, const char * because) {
        open_store s({});
        other.write(dir / "other.gguf");
        const std::string err = s.low(dir / "other.gguf");
        CHECK(has(err, "other.gguf"));
        CHECK(has(err, because));
    };
    moe_file other;
    other.arch = "olmoe";
    refused(other, "olmoe");
    other = {};
    other.router = 1.5f;
    refused(other, "blk.0.ffn_gate_inp.weight");
    other = {};
    other.n_expert = 8;
    refused(other, "[32, 64, 8]");
    other = {};
    other.n_ff = 32;
    refused(other, "blk.0.ffn_gate_exps.weight");
    other = {};
    other.n_layer = 1;
    refused(other, "blk.1.ffn_gate_exps.weight is missing");
    other = {};
    other.skip = 1;
    refused(other, "blk.1.ffn_down_exps.weight is missing");
    other = {};
    other.routers = false;
    refused(other, "router");
}

static void files_with_other_factors_per_expert_are_refused() {
    for (float high : { 0.0f, 1.0f, 2.0f }) {
        for (float low : { 0.0f, 1.0f, 2.0f }) {
            moe_file model;
            model.scale = high;
            open_store s(model);
            model.scale = low;
            model.write(dir / "low.gguf");
            const std::string err = s.low(dir / "low.gguf");
            CHECK((err == "") == (high == low));
            CHECK(err == "" || (has(err, "low.gguf") && has(err, "blk.0.ffn_up_exps.scale")));
        }
    }
}

static void a_pair_id_stands_for_the_routers() {
    moe_file high;
    high.pair_id = "one";
    moe_file low = high;
    low.routers = false;
    open_store s(high);
    low.write(dir / "low.gguf");

    const auto open_with_id = [&](std::string & err) {
        ggml_context *   ctx    = nullptr;
        gguf_init_params params = { true, &ctx };
        gguf_context *   meta   = gguf_init_from_file((dir / "high.gguf").c_str(), params);
        const bool ok = s.store.open_low(dir / "low.gguf", meta, err);
        gguf_free(meta);
        ggml_free(ctx);
        return ok;
    };
    std::string err;
    CHECK(open_with_id(err));
    low.pair_id = "two";
    low.write(dir / "low.gguf");
    CHECK(!open_with_id(err));
    CHECK(has(err, "two") && has(err, "one"));
}

static void damaged_files_are_refused() {
    open_store s({});
    CHECK(has(s.low(dir / "absent.gguf"), "absent.gguf"));
    CHECK(has(s.low(dir.path), "GGUF"));

    moe_file low;
    low.write(dir / "cut.gguf");
    struct stat st;
    stat((dir / "cut.gguf").c_str(), &st);
    CHECK(truncate((dir / "cut.gguf").c_str(), st.st_size - 1000) == 0);
    const std::string err = s.low(dir / "cut.gguf");
    CHECK(has(err, "truncated") && has(err, "blk.1.ffn_down_exps.weight"));
    CHECK(truncate((dir / "cut.gguf").c_str(), 100) == 0);
    CHECK(has(s.low(dir / "cut.gguf"), "GGUF"));
    CHECK(truncate((dir / "cut.gguf").c_str(), 0) == 0);
    CHECK(has(s.low(dir / "cut.gguf"), "GGUF"));
}

static void shards_are_found_from_any_of_them() {
    open_store s({});
    moe_file low;
    low.type        = GGML_TYPE_Q8_0;
    low.split_count = 2;
    const std::string names[] = { dir / "m-00001-of-00002.gguf", dir / "m-00002-of-00002.gguf" };
    for (int i = 0; i < 2; ++i) {
        low.split_no = i;
        low.write(names[i]);
    }
    for (const std::string & name : names) {
        CHECK(s.low(name) == "");
    }
    // a copy under the wrong number
    low.split_no = 0;
    low.write(names[1]);
    CHECK(has(s.low(names[0]), "00002-of-00002"));
    unlink(names[1].c_str());
    CHECK(has(s.low(names[0]), "m-00002-of-00002.gguf"));
    low.write(dir / "renamed.gguf");
    CHECK(has(s.low(dir / "renamed.gguf"), "00002.gguf"));
}

static void a_changed_file_is_noticed() {
    open_store s({});
    const hobbit_file & file = *s.store.files[0];
    CHECK(file.changed() == "");
    CHECK(truncate((dir / "high.gguf").c_str(), file.size - 1) == 0);
    CHECK(has(file.changed(), "high.gguf") && has(file.changed(), std::to_string(file.size).c_str()));
}

int main() {
    every_expert_is_found();
    only_routed_experts_are_managed();
    dense_model_is_refused();
    a_quantised_file_of_the_same_model_is_low();
    another_model_is_refused();
    files_with_other_factors_per_expert_are_refused();
    a_pair_id_stands_for_the_routers();
    damaged_files_are_refused();
    shards_are_found_from_any_of_them();
    a_changed_file_is_noticed();
    return check_result("store");
}
