#compdef meshwright
# Completion of meshwright in zsh, by `meshwright completion zsh`.

@TABLES@

_meshwright() {
    local cur=${words[CURRENT]} prev=${words[CURRENT - 1]} verb=${words[2]} start=3 rows
    if ((CURRENT == 2)); then
        _meshwright_offer "$(_meshwright_verbs)"
        return
    fi
    rows=$(_meshwright_verbs "$verb")
    if [[ -n $rows ]]; then
        if ((CURRENT == 3)); then
            _meshwright_offer "$rows"
            return
        fi
        verb="$verb ${words[3]}" start=4
    fi
    if [[ $cur == --*=* ]]; then
        prev=${cur%%=*}
        compset -P '*='
        cur=${cur#*=}
    fi
    if [[ $prev == --help || $prev == -h ]]; then
        _meshwright_offer "$(_meshwright_names "$verb")"
        return
    fi
    if [[ $prev == --* && $cur != -* ]]; then
        rows=$(_meshwright_values "$verb" "$prev")
        [[ -n $rows ]] || rows=$(_meshwright_values '*' "$prev")
        if [[ -n $rows ]]; then
            _meshwright_offer "$rows"
            return
        fi
    fi
    if [[ $cur == --*.* ]]; then
        _meshwright_offer "$(_meshwright_keys "$verb")"
    elif [[ $cur == -* ]]; then
        _meshwright_offer "$(_meshwright_flags "$verb")"
        local -a tables=(${(u)${(f)"$(_meshwright_keys "$verb")"}/.*/.})
        compadd -S '' -- $tables
    else
        _meshwright_offer "$(_meshwright_places "$verb")"
    fi
}

# Offer the first words of rows, each with what it is, and files.
_meshwright_offer() {
    local row
    local -a found
    for row in ${(f)1}; do
        case $row in
        @file*) _files ;;
        @folder*) _files -/ ;;
        $'\t'*) ;;
        *) found+=("${${row%%$'\t'*}//:/\\:}:${row#*$'\t'}") ;;
        esac
    done
    _describe -V word found
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _meshwright "$@"
else
    compdef _meshwright meshwright
fi
